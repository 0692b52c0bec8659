"""Publishing: torn reads, requests that mix versions, and the time to the first token."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.flat import flatten
from bench.sharing.rig import ADAPTER, REPLICA, Answer, Rig, until
from services.replica.engines.torch.engine import TorchEngine
from services.replica.shadow import Card, ShadowReader, ShadowWriter
from services.replica.shadow_feed import ShadowFeed
from services.replica.training.context import read_tensors
from services.replica.training.model import Adapter, LoraSpec, build_base
from services.replica.weights import open_fused
from shared.lifetime import Stamp
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
        first, ended = self._asked, 0
        while self._engine.has_work() or (publish and self._asked < first + requests):
            if publish:
                self._publish()
                self._feed()
                # Each one that waits holds a version of its own, and there are 64 places for them.
                if self._asked < first + requests and self._asked - first - ended < 16:
                    self._ask()
            report = await self._engine.step()
            for _, output in report.outputs:
                tokens.setdefault(output.id, []).extend(output.tokens)
                ended += bool(output.finish)
                if output.adapter_version is not None:
                    versions[output.id] = output.adapter_version
        return [(versions[i], tokens[i]) for i in tokens]


def to_token(rig: Rig, parent: str, publishes: int) -> dict[str, float]:
    """From the start of a publication to the first token of that version, while four answers
    decode and two one-token probes are in flight; and the length of a step meanwhile.

    ``computed``: until the replica has computed the token; ``arrived``: until its reader has it.
    A probe follows as soon as one is answered: more of them would make the steps they wait for.
    """
    whole, bounds = flatten(read_tensors(Path(parent)))
    flat = whole.numpy()
    writer = ShadowWriter(rig.home / "replicas" / REPLICA / "shadow.bin", flat.nbytes)
    rng, found = random.Random(0), list[_Delay]()
    background = _Background(rig, rng)
    rig.samples()
    for number in range(publishes):
        background.keep(4)
        time.sleep(rng.random() * 2 * rig.block.step_estimate)  # anywhere in a step
        found.append(_publish_and_ask(rig, writer, flat, _card(f"p{number}", bounds)))
    rig.cancel(background.running)
    steps, _ = rig.samples()
    return {
        "median_ms": 1e3 * statistics.median(d.arrived for d in found),
        "worst_ms": 1e3 * max(d.arrived for d in found),
        "computed_median_ms": 1e3 * statistics.median(d.computed for d in found),
        "computed_worst_ms": 1e3 * max(d.computed for d in found),
        "written_ms": 1e3 * statistics.median(d.written for d in found),
        "taken_up_ms": 1e3 * statistics.median(d.started for d in found),
        "step_ms": 1e3 * statistics.median(s.seconds / s.steps for s in steps),
    }


@dataclass(frozen=True)
class _Delay:
    """Seconds since the start of a publication."""

    written: float  # the shadow's counter has changed
    started: float  # the engine begins the step with the first request of the new version
    computed: float
    arrived: float


class _Background:
    """Long answers that decode all the time."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self._rig, self._rng = rig, rng
        self.running: list[str] = []

    def keep(self, count: int) -> None:
        """So many of them decode when this returns."""
        rig = self._rig
        self.running = [i for i in self.running if not rig.answers[i].finish]
        missing = count - len(self.running)
        if missing:
            prompts = rig.prompts(self._rng, missing, 16)
            self.running += rig.submit(prompts, 256, adapter=ADAPTER)
        until(lambda: all(rig.answers[i].times for i in self.running), "decoding", 60)


def _publish_and_ask(
    rig: Rig, writer: ShadowWriter, flat: np.ndarray[Any, Any], card: Card
) -> _Delay:
    probes: list[str] = []

    def ask() -> None:
        waiting = sum(not rig.answers[request].times for request in probes)
        if waiting < 2:
            probes.extend(rig.submit([[5, 6, 7]] * (2 - waiting), 1, adapter=ADAPTER))

    def seen() -> Answer | None:
        ask()
        answers = (rig.answers[request] for request in probes)
        return next((a for a in answers if a.version == card.version and a.times), None)

    ask()
    begun = time.monotonic()
    writer.publish(card, flat)
    written = time.monotonic()
    first = until(seen, "new version", 30)
    rig.wait(probes)
    stamps = {name: rig.monotonic(at) for name, at in first.stamps.items()}
    return _Delay(
        written - begun,
        stamps[Stamp.STARTED] - begun,
        stamps[Stamp.FIRST_TOKEN] - begun,
        first.times[0] - begun,
    )
