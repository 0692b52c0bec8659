"""Reads the metrics and events streams: what finished, how long steps took, who changed state."""

from __future__ import annotations

from collections.abc import Callable

from redis.asyncio import Redis

from services.dispatcher.entries import key_of
from services.dispatcher.policies.base import Completion, StepSeen
from shared import names
from shared.messages import StepSample
from shared.redis_client import BLOCK_MS
from shared.tail import SampleReader

READ_COUNT = 500


class Signals:
    """``on_step`` gets each sample; ``on_state`` is called when any replica changed state."""

    def __init__(
        self,
        redis: Redis,
        on_step: Callable[[StepSample], None],
        on_state: Callable[[], None],
    ) -> None:
        self._redis, self._on_step, self._on_state = redis, on_step, on_state
        self._cursors: dict[str, bytes | str] = {}
        self._samples = SampleReader()

    async def start_now(self) -> None:
        """Read from here on; called before the replicas' streams are looked at."""
        for stream in (names.METRICS, names.EVENTS):
            last = await self._redis.xrevrange(stream, count=1)
            self._cursors[stream] = last[0][0] if last else "0"

    def start_at(self, milliseconds: int) -> None:
        """Read metrics from an earlier moment on (the oldest batch still in flight)."""
        self._cursors[names.METRICS] = f"{milliseconds}-0"

    async def read(self) -> None:
        """Wait for new entries and hand them on."""
        reply = await self._redis.xread(dict(self._cursors), count=READ_COUNT, block=BLOCK_MS)
        for stream, entries in reply or ():
            name = stream.decode()
            self._cursors[name] = entries[-1][0]
            if name == names.EVENTS:
                if any(fields.get(b"kind") == b"state" for _, fields in entries):
                    self._on_state()
                continue
            for entry_id, fields in entries:
                if fields and fields.get(b"kind", b"step").startswith(b"step"):
                    sample = self._samples.read(entry_id.decode(), fields)
                    if isinstance(sample, StepSample):
                        self._on_step(sample)


def completions_of(sample: StepSample) -> list[Completion]:
    """Requests that left the replica with this step."""
    return [
        Completion(
            id=key_of(done.id, done.attempt),
            replica=sample.replica,
            output_tokens=done.output_tokens,
            reason=done.reason,
        )
        for done in sample.finished
    ]


def step_of(sample: StepSample) -> StepSeen:
    """The step as a policy sees it."""
    return StepSeen(
        replica=sample.replica,
        seconds=sample.seconds,
        steps=sample.steps,
        b=sample.b,
        B=sample.B,
        prefill_tokens=sample.prefill_tokens,
        decode_tokens=sample.decode_tokens,
        waiting=sample.waiting,
        kv_used=sample.kv_used,
    )
