"""This project's engine."""

from __future__ import annotations

import statistics
from typing import Any

from bench.engine.workers.common import Handler, serve
from services.replica.engines.torch import TorchEngine
from shared.messages import Generate, Sampling


class Worker:
    """One engine; jobs run on it one after the other."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.engine = TorchEngine.load(
            settings["model"],
            name="model",
            dtype=settings["dtype"],
            threads=settings["threads"],
            kv_tokens=32768,
            weights=settings.get("weights", "shared"),
            prefix_cache=False,
        )
        self.jobs = 0

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        names = []
        for path in [*job.get("adapters", []), *job.get("idle_adapters", [])]:
            if path not in self.engine.adapters.current:
                self.engine.load_adapter(path, "1", path)
        names = job.get("adapters", [])
        self.jobs += 1
        self.engine.configure(b=job["concurrency"])
        for i, prompt in enumerate(job["prompts"]):
            self.engine.submit(
                Generate(
                    id=f"{self.jobs}.{i}",
                    gateway="",
                    model="model",
                    adapter=names[i % len(names)] if names else None,
                    prompt=tuple(prompt),
                    sampling=Sampling(max_tokens=job["tokens"], temperature=0.0),
                    arrival=0.0,
                )
            )
        steps: dict[int, list[float]] = {}
        while self.engine.has_work():
            report = self.engine.step_now()
            if not report.prefill_tokens:
                steps.setdefault(report.b, []).append(report.seconds)
        for path in job.get("idle_adapters", []):
            self.engine.unload_adapter(path)
        return {"steps": {str(b): statistics.median(s) for b, s in steps.items()}}


def start(settings: dict[str, Any]) -> Handler:
    return Worker(settings)


if __name__ == "__main__":
    serve(start)
