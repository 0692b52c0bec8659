"""Publishing: torn reads, requests that mix versions, and the time to the first token."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.sharing.rig import ADAPTER, REPLICA, Rig, until
from services.replica.engines.torch.engine import TorchEngine
from services.replica.shadow import Card, ShadowReader, ShadowWriter
from services.replica.shadow_feed import ShadowFeed
from services.replica.training.context import read_tensors
from services.replica.training.model import Adapter, LoraSpec, build_base
from services.replica.weights import open_fused
from shared.messages import Generate, Sampling

SPEC = LoraSpec(8, 16.0, ("q_proj", "k_proj", "v_proj", "o_proj"))


def torn(count: int, size: int) -> dict[str, int]:
    """``count`` publishes of ``size`` floats by another process as fast as it can; every copy
    that the reader accepts is checked whole: all its numbers must name its version."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "shadow"
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_publish, args=(str(path), size, count, theirs), daemon=True
        )
        process.start()
        ours.recv()
        reader, bad, accepted, last = ShadowReader(path), 0, 0, 0
        ours.send(True)
        while last < count:
            for found in reader.poll():
                last, accepted = int(found.version), accepted + 1
                bad += not bool((found.tensors["x"] == float(last)).all())
        process.join()
        return {"publishes": count, "accepted": accepted, "torn": bad, "again": reader.rejected}


def _publish(path: str, size: int, count: int, pipe: Connection) -> None:
    writer = ShadowWriter(Path(path), size * 4)
    data = np.zeros(size, dtype=np.float32)
    pipe.send(True)
    pipe.recv()
    for i in range(1, count + 1):
        data.fill(i)
        writer.publish(_card(str(i), {"x": (0, size, (size,))}), data)


def _card(version: str, tensors: dict[str, tuple[int, int, tuple[int, ...]]]) -> Card:
    return Card(
        name=ADAPTER,
        version=version,
        rank=SPEC.r,
        lora_alpha=SPEC.lora_alpha,
        target_modules=SPEC.target_modules,
        tensors=tensors,
    )


def mixed(folder: Path, requests: int) -> dict[str, int]:
    """Two sets of weights published in turn at every engine step while requests run: an answer
    must be, token by token, that of the version it names. fp32, greedy."""
    with tempfile.TemporaryDirectory() as scratch:
        engine = TorchEngine.load(
            folder, name="m", dtype="float32", kv_tokens=4096, b_max=8, prefix_cache=True
        )
        writer = ShadowWriter(Path(scratch) / "shadow", 1 << 22)
        feed = ShadowFeed(Path(scratch) / "shadow", engine, Path(scratch))
        flats, bounds = _two_versions(folder)
        run = _Mixed(engine, writer, feed, flats, bounds)
        golden = [run.alone(turn) for turn in (0, 1)]
        wrong = run.together(requests, golden)
        return {
            "requests": requests,
            "versions_used": len(run.used),
            "mixed": wrong,
            "distinguishable": int(golden[0] != golden[1]),
        }


def _two_versions(folder: Path) -> tuple[list[np.ndarray[Any, Any]], dict[str, Any]]:
    adapter = Adapter.attach(build_base(folder, open_fused(folder, "float32").views), SPEC)
    flats = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        flats.append(torch.randn_like(adapter.flat).mul_(0.05).numpy())
    return flats, adapter.bounds()


class _Mixed:
    def __init__(
        self,
        engine: TorchEngine,
        writer: ShadowWriter,
        feed: ShadowFeed,
        flats: Sequence[np.ndarray[Any, Any]],
        bounds: dict[str, Any],
    ) -> None:
        self._engine, self._writer, self._feed = engine, writer, feed
        self._flats, self._bounds = flats, bounds
        self._published = self._asked = 0
        self.used: set[str] = set()

    def alone(self, turn: int) -> list[int]:
        """The answer under one set of weights, nothing else running."""
        while self._published % 2 != turn or not self._published:
            self._publish()
        self._feed()
        self._ask()
        return asyncio.run(self._run(1, publish=False))[0][1]

    def together(self, requests: int, golden: Sequence[list[int]]) -> int:
        """How many answers are not the golden one of their version."""
        found = asyncio.run(self._run(requests, publish=True))
        self.used = {version for version, _ in found}
        return sum(tokens != golden[int(version) % 2] for version, tokens in found)

    def _publish(self) -> None:
        self._published += 1
        flat = self._flats[self._published % 2]
        self._writer.publish(_card(str(self._published), self._bounds), flat)

    def _ask(self) -> None:
        self._asked += 1
        request = Generate(
            id=str(self._asked),
            gateway="g",
            model="m",
            adapter=ADAPTER,
            prompt=tuple(range(20, 40)),
            sampling=Sampling(max_tokens=12, temperature=0.0, ignore_eos=True),
            arrival=0.0,
        )
        self._engine.submit(request)

    async def _run(self, requests: int, *, publish: bool) -> list[tuple[str, list[int]]]:
        tokens: dict[str, list[int]] = {}
        versions: dict[str, str] = {}
        first = self._asked
        while self._engine.has_work() or (publish and self._asked < first + requests):
            if publish:
                self._publish()
                self._feed()
                if self._asked < first + requests:
                    self._ask()
            report = await self._engine.step()
            for _, output in report.outputs:
                tokens.setdefault(output.id, []).extend(output.tokens)
                if output.adapter_version is not None:
                    versions[output.id] = output.adapter_version
        return [(versions[i], tokens[i]) for i in tokens]


def to_token(rig: Rig, parent: str, publishes: int) -> dict[str, float]:
    """From the flip of the counter to the arrival of a first token of that version, with four
    longer requests and two one-token probes in flight; and the length of a step meanwhile.

    A probe follows as soon as one is answered: more of them would make the steps they wait for.
    """
    tensors = read_tensors(Path(parent))
    flat = np.concatenate([t.numpy().ravel() for t in tensors.values()])
    bounds, at = {}, 0
    for name, tensor in tensors.items():
        bounds[name] = (at, at + tensor.numel(), tuple(tensor.shape))
        at += tensor.numel()
    writer = ShadowWriter(rig.home / "replicas" / REPLICA / "shadow.bin", flat.nbytes)
    rng, delays = random.Random(0), []
    rig.samples()
    for number in range(publishes):
        ids = rig.submit(rig.prompts(rng, 4, 16), 8, adapter=ADAPTER)
        version = f"p{number}"
        begun = time.monotonic()
        writer.publish(_card(version, bounds), flat)
        more: list[str] = []

        def seen(wanted: str = version, sent: list[str] = more) -> float | None:
            waiting = sum(not rig.answers[request].times for request in sent)
            if waiting < 2:
                sent += rig.submit([[5, 6, 7]] * (2 - waiting), 1, adapter=ADAPTER)
            for request in sent:
                answer = rig.answers[request]
                if answer.version == wanted and answer.times:
                    return answer.times[0]
            return None

        delays.append(until(seen, "new version", 30) - begun)
        rig.wait(ids + more)
    steps, _ = rig.samples()
    step = statistics.median(s.seconds / s.steps for s in steps)
    return {
        "median_ms": 1e3 * statistics.median(delays),
        "worst_ms": 1e3 * max(delays),
        "step_ms": 1e3 * step,
    }
