"""What a replica tells the metrics stream about its steps: merged, numbered, never flooding.

Pure: takes reports and times, returns samples. A sample goes out at once when a request finished
in it, otherwise after SPACING seconds. Only steps of one kind are merged (the same b and B, with
or without prefill), so that latency models can be fitted to what comes out; steps too short to
be measured are merged whatever they did.
"""

from __future__ import annotations

import msgspec

from services.replica.engines.base import EngineStatus, StepReport
from shared.messages import StepSample

SPACING = 0.1  # seconds between samples that nobody waits for
SHORT = 0.002  # seconds; below this a step's duration says nothing
MOST_FINISHED = 4096  # requests in one sample


class Sampler:
    """Turns step reports of one replica into numbered samples."""

    def __init__(self, replica: str, model: str, *, emulated: bool) -> None:
        self._replica, self._model, self._emulated = replica, model, emulated
        self._incarnation = ""
        self._seq = 0
        self._pending: list[StepSample] = []
        self._last_sent = 0.0

    def restart(self, incarnation: str) -> None:
        """A new incarnation counts from 1; what was not sent is dropped."""
        self._incarnation, self._seq = incarnation, 0
        self._pending.clear()

    def add(self, report: StepReport, status: EngineStatus, B: int, now: float) -> None:
        """Take in one engine step that ended at ``now`` (Redis seconds)."""
        sample = StepSample(
            replica=self._replica,
            model=self._model,
            incarnation=self._incarnation,
            seq=0,
            time=now,
            seconds=report.seconds,
            b=report.b,
            B=B,
            prefill_tokens=report.prefill_tokens,
            decode_tokens=report.decode_tokens,
            waiting=status.waiting,
            kv_used=status.kv_used,
            kv_total=status.kv_total,
            finished=report.finished,
            emulated=self._emulated,
        )
        if self._pending and _alike(self._pending[-1], sample):
            self._pending[-1] = _merged(self._pending[-1], sample)
        else:
            self._pending.append(sample)

    def take(self, now: float) -> list[StepSample]:
        """Samples that are due, numbered; the caller must publish them in order."""
        urgent = any(sample.finished for sample in self._pending)
        if not self._pending or not (urgent or now - self._last_sent >= SPACING):
            return []
        self._last_sent = now
        taken = []
        for sample in self._pending:
            self._seq += 1
            taken.append(msgspec.structs.replace(sample, seq=self._seq))
        self._pending.clear()
        return taken


def _alike(a: StepSample, b: StepSample) -> bool:
    if len(a.finished) + len(b.finished) > MOST_FINISHED:
        return False
    if a.seconds < SHORT * a.steps and b.seconds < SHORT:
        return True
    return (a.b, a.B, a.prefill_tokens > 0) == (b.b, b.B, b.prefill_tokens > 0)


def _merged(a: StepSample, b: StepSample) -> StepSample:
    steps = a.steps + b.steps
    return msgspec.structs.replace(
        b,
        seconds=a.seconds + b.seconds,
        steps=steps,
        b=round((a.b * a.steps + b.b * b.steps) / steps),
        prefill_tokens=a.prefill_tokens + b.prefill_tokens,
        decode_tokens=a.decode_tokens + b.decode_tokens,
        finished=a.finished + b.finished,
    )
