"""``python -m bench.engine``: output tokens/s of this engine and its neighbours.

Same model, prompts, dtype and lengths for all; engines take turns in every round, and the
median over the rounds counts. Peers that ``bench.peers_setup`` has not installed are null. A
table goes to stderr, one JSON line comes last on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.engine import accuracy, gguf_file, limits, material, prefix, runner
from bench.engine.variants import Variants
from bench.peers_setup import PEERS, python_of
from collm import models
from services.replica.engines.torch.config import read_config
from services.replica.weights import resolve_dtype
from shared.settings import user_cache

CONCURRENCY = (1, 4, 16, 32, 64)
STEPS_B = (1, 2, 4, 8, 16, 24, 32, 48, 64)
PARTS = ("speed", "prefill", "adapters", "steps", "accuracy", "variants", "prefix")
err = Console(stderr=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.engine", description=__doc__)
    parser.add_argument("--model", default=models.DEFAULT_NAME, help="folder or name in the cache")
    parser.add_argument("--data", type=Path, help="chats to ask (JSONL …); none: made ones")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--weights", default="shared", choices=("shared", "packed"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=64, help="to generate for each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma separated")
    parser.add_argument("--peers", default="transformers," + ",".join(PEERS))
    parser.add_argument("--gguf", type=Path, help="for llama.cpp; none: written, in --dtype")
    parser.add_argument("--quick", action="store_true", help="one round, 16 tokens")
    found = parser.parse_args()
    unknown = set(found.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    if found.quick:
        found.rounds, found.tokens = 1, 16
    return found


class Bench:
    """The parts, one after the other; ``line`` is what the JSON line will say."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options = options
        self.folder = models.resolve(options.model, lambda line: err.print(line)).path
        self.dtype = resolve_dtype(options.dtype)
        self.prompts = material.prompts(self.folder, options.data, 64)
        self.adapters = material.write_adapters(self.folder, scratch, 8, self.dtype)
        self.settings: dict[str, Any] = {
            "model": str(self.folder),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": options.threads,
            "weights": options.weights,
            "converted": str(user_cache() / "peers" / "openvino-models" / self.folder.name),
        }
        if python_of("llamacpp") and "llamacpp" in options.peers.split(","):
            file = options.gguf or gguf_file.write(self.folder, scratch / "model.gguf", self.dtype)
            self.settings["gguf"] = str(file)
        self.left_out: dict[str, str] = {}
        self.workers: dict[str, runner.Worker] = {}
        names = ["collm", "transformers", *PEERS]
        self.line: dict[str, Any] = {
            "bench": "engine",
            "dtype": self.settings["dtype"],
            "tok_s": dict.fromkeys(names),
            "tok_s_adapters": {"collm": None, "vllm": None},
            "prefill_tok_s": dict.fromkeys(names),
            "adapters_cost": None,
            "idle_adapters_cost": None,
            "roofline_fraction": None,
            "latency_line": None,
            "unmerged_against_merged": None,
            "variants_tok_s": None,
            "prefix": None,
            "spread": None,
            "left_out": self.left_out,
            "quick": options.quick,
            "data": "file" if options.data else "made",
        }
        for name in self._engines():
            self._start(name)

    def _start(self, name: str, **changes: Any) -> None:
        """Start an engine and let it answer once; a peer that cannot is left out, and why."""
        try:
            worker = runner.start(name, {**self.settings, **changes})
            worker.run(**self._job(2, 4))
        except runner.WorkerError as e:
            if name == "collm":
                raise
            self._leave_out(name, f"does not run on this machine: {e}")
        else:
            self.workers[name] = worker

    def _leave_out(self, peer: str, why: str) -> None:
        self.left_out[peer] = why
        err.print(f"{peer}: left out, {why}")

    def _engines(self) -> list[str]:
        """This engine and the wanted peers that are there."""
        found = ["collm"]
        for peer in filter(None, self.options.peers.split(",")):
            if peer != "transformers" and python_of(peer) is None:
                self._leave_out(peer, "not installed (make bench-peers-setup)")
            else:
                found.append(peer)
        return found

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def _rates(self, jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
        """Median tokens/s by engine and job; every round runs all of them once."""
        seconds: dict[tuple[str, str], list[float]] = {}
        for _ in range(self.options.rounds):
            for label, job in jobs.items():
                for name, worker in self.workers.items():
                    answer = worker.run(**job)
                    seconds.setdefault((name, label), []).append(answer["seconds"])
        rates: dict[str, dict[str, float]] = {name: {} for name in self.workers}
        for (name, label), times in seconds.items():
            job = jobs[label]
            made = len(job["prompts"]) * job["tokens"]
            if job["tokens"] == 1:
                made = sum(map(len, job["prompts"]))
            rates[name][label] = round(made / statistics.median(times), 1)
            self._note_spread(times)
        return rates

    def _note_spread(self, times: list[float]) -> None:
        """The widest (max - min) / median of any measurement so far."""
        spread = (max(times) - min(times)) / statistics.median(times)
        self.line["spread"] = round(max(self.line["spread"] or 0.0, spread), 3)

    def _job(self, concurrency: int, tokens: int, **fields: Any) -> dict[str, Any]:
        count = max(2, min(concurrency, 64))
        return {
            "prompts": self.prompts[:count],
            "concurrency": concurrency,
            "tokens": tokens,
            **fields,
        }

    def speed(self) -> None:
        jobs = {str(c): self._job(c, self.options.tokens) for c in CONCURRENCY}
        self.line["tok_s"].update(self._rates(jobs))

    def prefill(self) -> None:
        rates = self._rates({"prefill": self._job(64, 1)})
        self.line["prefill_tok_s"].update({name: r["prefill"] for name, r in rates.items()})

    def adapters_(self) -> None:
        """0, 1, 4, 8 adapters in a batch of 32, and 8 loaded ones that nobody uses."""
        tokens = self.options.tokens
        jobs = {str(n): self._job(32, tokens, adapters=self.adapters[:n]) for n in (0, 1, 4, 8)}
        jobs["idle"] = self._job(32, tokens, idle_adapters=self.adapters)
        ours = {"collm": self.workers["collm"]}
        every, self.workers = self.workers, ours
        rates = self._rates(jobs)["collm"]
        self.workers = every
        self.line["tok_s_adapters"]["collm"] = {n: rates[n] for n in ("1", "4", "8")}
        self.line["adapters_cost"] = {n: round(rates["0"] / rates[n], 3) for n in ("0", "1", "8")}
        self.line["idle_adapters_cost"] = round(rates["0"] / rates["idle"], 3)
        if "vllm" in self.workers:
            self._vllm_adapters({n: jobs[n] for n in ("1", "4", "8")})

    def _vllm_adapters(self, jobs: dict[str, dict[str, Any]]) -> None:
        """A second vLLM, as LoRA is enabled when it starts."""
        every, self.workers = self.workers, {}
        self._start("vllm", lora_slots=8)
        if self.workers:
            self.line["tok_s_adapters"]["vllm"] = self._rates(jobs)["vllm"]
            self.close()
        self.workers = every

    def steps(self) -> None:
        """The paper's line T = a1 b + a0 over measured decode steps; the share of the bound."""
        worker = self.workers["collm"]
        times: dict[int, list[float]] = {b: [] for b in STEPS_B}
        for _ in range(self.options.rounds):
            for b in STEPS_B:
                prompts = [p[:64] for p in self.prompts[:b]]
                job = {"prompts": prompts, "concurrency": b, "tokens": max(self.options.tokens, 24)}
                times[b].append(worker.run(**job)["steps"][str(b)])
        step = {b: statistics.median(t) for b, t in times.items()}
        slope, intercept = np.polyfit(list(step), list(step.values()), 1)
        left = np.array(list(step.values())) - (slope * np.array(list(step)) + intercept)
        r2 = 1 - float((left**2).sum()) / (float(np.var(list(step.values()))) * len(step))
        self.line["latency_line"] = {
            "alpha1_ms": round(1e3 * float(slope), 4),
            "alpha0_ms": round(1e3 * float(intercept), 3),
            "r2": round(r2, 4),
            "step_ms": {str(b): round(1e3 * s, 2) for b, s in step.items()},
        }
        config = read_config(self.folder)
        machine = limits.measure(self.options.threads, self.dtype)
        self.line["roofline_fraction"] = {
            str(b): round(limits.bound(config, machine, self.dtype.itemsize, b, 96) / step[b], 3)
            for b in (1, 64)
        }
        err.print(
            f"limits now: {machine.bandwidth / 1e9:.1f} GB/s, {machine.flops / 1e9:.0f} GFLOP/s"
        )

    def accuracy(self) -> None:
        texts = material.texts(self.folder, self.options.data, 4 if self.options.quick else 32)
        found = accuracy.compare(
            self.folder, Path(self.adapters[0]), texts, self.dtype, self.options.threads
        )
        self.line["unmerged_against_merged"] = {k: round(v, 6) for k, v in found.items()}

    def variants(self) -> None:
        """One adapter merged, unmerged, republished at every step, and on packed weights."""
        ways = Variants(self.folder, Path(self.adapters[0]), self.dtype, self.options.threads)
        prompts = [p[:64] for p in self.prompts[:32]]
        self.line["variants_tok_s"] = {
            str(b): ways.compare(
                prompts[: 2 * b], min(32, self.options.tokens), b, self.options.rounds
            )
            for b in (1, 16)
        }
        ways.close()

    def prefix(self) -> None:
        self.line["prefix"] = prefix.compare(
            self.folder, self.settings, chats=8, tokens=16, rounds=self.options.rounds
        )

    def table(self) -> None:
        table = Table(title=f"output tokens/s, {self.settings['dtype']}")
        for heading in ("engine", *map(str, CONCURRENCY), "prefill"):
            table.add_column(heading, justify="right")
        for name, rates in self.line["tok_s"].items():
            cells = [f"{rates[str(c)]:.0f}" if rates else "-" for c in CONCURRENCY]
            prefill = self.line["prefill_tok_s"][name]
            table.add_row(name, *cells, f"{prefill:.0f}" if prefill else "-")
        err.print(table)
        for name, why in self.left_out.items():
            err.print(f"{name}: {why}")


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="collm-bench-") as scratch:
        bench = Bench(options, Path(scratch))
        try:
            for part in options.parts.split(","):
                err.print(f"… {part}")
                getattr(bench, "adapters_" if part == "adapters" else part)()
        finally:
            bench.close()
        bench.table()
        print(json.dumps(bench.line))


if __name__ == "__main__":
    main()
