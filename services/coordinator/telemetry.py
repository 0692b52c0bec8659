"""What the coordinator learns from the metrics stream: latency samples, progress, lengths.

Pure books: messages in, planes and numbers out.
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import msgspec

from services.coordinator.fit import Plane, Sample, Window, latency_model
from services.coordinator.goodput import Progress, noise_scale, pooled
from shared.latency import LatencyModel
from shared.messages import StepSample, TrainSample
from shared.records import ReplicaRecord
from shared.rounds import GradientNoise

T = TypeVar("T")

SHORT = 0.0005  # seconds a step; shorter ones say nothing
ADAPTERS_KEPT = 1000
KEPT = 60.0  # seconds of finished requests that a rate can be asked of


class Planes(msgspec.Struct, frozen=True, kw_only=True):
    """The three fits of one replica; None: not observed."""

    decode: Plane | None = None
    prefill: Plane | None = None
    train: Plane | None = None

    def model(self) -> LatencyModel | None:
        """None until a slope of decoding is known: one batch size tells nothing of others."""
        if self.decode is None or not self.decode.observed_x:
            return None
        return latency_model(self.decode, self.prefill, self.train)


class _Windows:
    def __init__(self) -> None:
        self.decode, self.prefill, self.train = Window(), Window(), Window()


class Telemetry:
    """Windows a replica; ``hardware`` says which replicas pool their samples."""

    def __init__(self, usual_B: int = 4) -> None:
        self._usual_B = float(usual_B)  # stands for B while serving beside training is unseen
        self._windows: dict[str, _Windows] = {}
        self._hardware: dict[str, str] = {}
        self._version = 0  # of the samples
        self._fitted: dict[tuple[str, str], tuple[int, Planes]] = {}  # by pool
        self._progress: dict[str, Progress] = {}
        self._noise: dict[str, GradientNoise | None] = {}  # of an adapter, over its clients
        self._round_costs: dict[str, float] = {}  # of an adapter: seconds that are not training
        self._lengths: dict[str, tuple[float, float]] = {}
        self._finished: dict[str, deque[tuple[float, int]]] = {}  # of the last KEPT seconds

    def describe(self, replica: str, hardware: str) -> None:
        """Say what a replica runs on (host, engine, model, threads): equal ones pool."""
        if self._hardware.get(replica) != hardware:
            self._hardware[replica] = hardware
            self._version += 1

    def forget(self, replica: str) -> None:
        self._version += 1
        self._fitted.pop(self._pool(replica), None)
        for book in (self._windows, self._hardware, self._progress):
            book.pop(replica, None)

    def step(self, sample: StepSample) -> None:
        """One inference sample; steps with prefill count what exceeds their decode part."""
        self._note_finished(sample)
        per_step = sample.seconds / max(1, sample.steps)
        if per_step < SHORT or sample.b <= 0:
            return
        windows = self._windows.setdefault(sample.replica, _Windows())
        self._version += 1
        if sample.prefill_tokens == 0:
            windows.decode.add(Sample(sample.time, sample.b, sample.B, per_step))
            return
        if sample.steps != 1:
            return
        decode = windows.decode.fit(sample.time)
        rest = per_step
        if decode is not None and sample.decode_tokens > 0:
            rest = per_step - decode(sample.decode_tokens, sample.B)
        windows.prefill.add(Sample(sample.time, sample.prefill_tokens, sample.B, rest))

    def train(self, sample: TrainSample) -> None:
        """One optimiser step: its mean micro-step, and what it says about learning."""
        windows = self._windows.setdefault(sample.replica, _Windows())
        self._version += 1
        windows.train.add(Sample(sample.time, sample.B, sample.b, sample.micro_seconds))

    def client_ended(
        self, adapter: str, replica: str, loss_reduction: float | None, noise: GradientNoise | None
    ) -> None:
        """A client's part of a round."""
        old = self._progress.get(replica, Progress())
        self._progress[replica] = old.updated(loss_reduction)
        _put(self._noise, adapter, pooled(self._noise.get(adapter), noise))

    def progress(self, adapter: str, replica: str) -> Progress:
        """The replica's fall of the loss, the adapter's noise scale."""
        found = self._progress.get(replica, Progress())
        scale = noise_scale(self._noise.get(adapter))
        return found if scale is None else msgspec.structs.replace(found, noise_scale=scale)

    def round_ended(self, adapter: str, fixed: float) -> None:
        """``fixed``: the round's seconds in which its slowest client did not train."""
        old = self._round_costs.get(adapter, fixed)
        _put(self._round_costs, adapter, (old + fixed) / 2)

    def round_cost(self, adapter: str) -> float:
        """Seconds of a round that are not training, smoothed; 0 before the first one."""
        return self._round_costs.get(adapter, 0.0)

    def seen_alone(self, replica: str) -> bool:
        """Whether this replica, or one like it, was seen decoding while nothing trained."""
        return any(w.decode.has(y=0) for w in self._like(replica))

    def _like(self, replica: str) -> list[_Windows]:
        """Its own windows first (perhaps empty), then those of replicas on the same hardware."""
        mine = self._hardware.get(replica)
        others = [
            w
            for name, w in self._windows.items()
            if name != replica and mine is not None and self._hardware.get(name) == mine
        ]
        return [self._windows.get(replica) or _Windows(), *others]

    def planes(self, replica: str, now: float) -> Planes:
        """Fits over this replica's samples and those of its like.

        They are its like's as well, so one does for all; and without new samples it stays as it
        is, since all weights fade alike.
        """
        pool = self._pool(replica)
        known = self._fitted.get(pool)
        if known is not None and known[0] == self._version:
            return known[1]
        own, *others = self._like(replica)
        found = Planes(
            decode=own.decode.fit(now, [w.decode for w in others], self._usual_B, shaped=True),
            prefill=own.prefill.fit(now, [w.prefill for w in others], self._usual_B),
            train=own.train.fit(now, [w.train for w in others]),
        )
        self._fitted[pool] = (self._version, found)
        return found

    def _pool(self, replica: str) -> tuple[str, str]:
        hardware = self._hardware.get(replica)
        return ("replica", replica) if hardware is None else ("hardware", hardware)

    def lengths(self, base: str) -> tuple[float, float]:
        """Mean prompt and output tokens of recent requests."""
        return self._lengths.get(base, (128.0, 128.0))

    def rate(self, base: str, now: float, seconds: float = 30.0) -> float:
        """Finished requests per second of late; arrivals when the dispatcher names none.

        ``seconds``: KEPT at most.
        """
        return sum(n for t, n in self._finished.get(base, ()) if t >= now - seconds) / seconds

    def _note_finished(self, sample: StepSample) -> None:
        done = [f for f in sample.finished if f.reason in ("stop", "length")]
        if not done:
            return
        prompt, output = self.lengths(sample.model)
        for f in done:
            prompt += (f.prompt_tokens - prompt) / 50
            output += (f.output_tokens - output) / 50
        self._lengths[sample.model] = (prompt, output)
        # Nobody may ever ask for the rate: what is old goes when something new comes.
        recent = self._finished.setdefault(sample.model, deque())
        recent.append((sample.time, len(done)))
        while recent[0][0] < sample.time - KEPT:
            recent.popleft()


def _put(book: dict[str, T], adapter: str, value: T) -> None:
    """The adapter's later sessions begin with what is kept; of many adapters, the latest."""
    book.pop(adapter, None)
    book[adapter] = value
    if len(book) > ADAPTERS_KEPT:
        del book[next(iter(book))]


def hardware_of(record: ReplicaRecord) -> str:
    """Replicas with equal values run alike."""
    return f"{record.model}|{record.engine}|{record.host}|{record.thread_slots}"
