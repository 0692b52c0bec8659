"""An engine that computes nothing and takes its time from a hardware profile.

The batching is that of the real engine: requests join and leave at any iteration, prompts are
prefilled in chunks beside running decodes, KV memory is reserved before a request starts. Only
the forward pass is replaced by a pause of T_prefill + T_infer (shared.latency). No torch, so
many replicas run in one process. Everything it produces is marked as emulated.

Baselines: ``static`` batching runs a batch to its end before the next one starts (Transformers +
PEFT); ``merged`` adapters serve one adapter at a time at the speed of the base and pay a switch
(dLoRA, OSDI'24).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable

import msgspec

from services.replica.engines import emulated_text
from services.replica.engines.alarm import Alarm
from services.replica.engines.base import EngineStatus, Rejected, StepReport
from services.replica.engines.emulated_adapters import EmulatedAdapters
from services.replica.engines.emulated_sequence import Sequence
from services.replica.lag import LagMeter
from shared.clock import Now
from shared.latency import LatencyModel
from shared.lifetime import Stamp
from shared.messages import Finished, Generate, Output
from shared.profile import Profile
from shared.records import ModelCard


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How the emulation behaves beyond its profile."""

    time_scale: float = 1.0  # emulated seconds in a real second
    seed: int = 0
    batching: str = "continuous"
    lora: str = "unmerged"
    max_step_tokens: int = 512


class EmulatedEngine:
    """See the module. ``beside`` returns the micro-batch that trains beside it at the moment."""

    def __init__(
        self,
        card: ModelCard,
        profile: Profile,
        *,
        words: tuple[int, ...],
        b_max: int,
        kv_tokens: int,
        options: Options,
        now: Now,
        beside: Callable[[], int] = int,
    ) -> None:
        self.card = card
        self.b_max = b_max
        self.lag = LagMeter()
        self._alarm = Alarm()
        self._profile, self._options, self._now, self._beside = profile, options, now, beside
        self._words = words
        self._b = b_max
        self._kv_total, self._kv_used = kv_tokens, 0
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}
        self._cancelled: list[Sequence] = []
        self._adapters = EmulatedAdapters(profile, merged=options.lora == "merged")
        self._random = random.Random(options.seed)
        self._due = 0.0
        # Static batching: size of the running batch, and what its members are to be told.
        self._batch = 0
        self._held: list[tuple[str, Output]] = []
        self._held_finished: list[Finished] = []

    # ------------------------------------------------------------ requests

    def submit(self, request: Generate) -> None:
        need = len(request.prompt) + request.sampling.max_tokens
        if need > min(self.card.context, self._kv_total):
            limit = min(self.card.context, self._kv_total)
            raise Rejected(
                f"prompt ({len(request.prompt)} tokens) and max_tokens "
                f"({request.sampling.max_tokens}) exceed the context of {limit} tokens",
                code="context_length_exceeded",
                param="prompt",
            )
        if request.adapter is not None and not self.has_adapter(
            request.adapter, request.adapter_version
        ):
            raise Rejected(
                f"adapter {request.adapter!r} is not loaded here",
                status=404,
                code="model_not_found",
                param="model",
            )
        version = request.adapter_version
        if request.adapter is not None and version is None:
            version = self._adapters.current[request.adapter]
        length = emulated_text.length(request, self._profile.output_mean, self._options.seed)
        # What an earlier attempt delivered may be all there is: then one more token ends it.
        length = min(max(length, len(request.generated) + 1), request.sampling.max_tokens)
        key = emulated_text.start(request, self._options.seed)
        self._waiting.append(Sequence(request, length, key, version))

    def cancel(self, request_id: str) -> bool:
        sequence = self._running.pop(request_id, None)
        if sequence is not None:
            self._kv_used -= sequence.reserved
        else:
            sequence = next((s for s in self._waiting if s.request.id == request_id), None)
            if sequence is None:
                return False
            self._waiting.remove(sequence)
        self._cancelled.append(sequence)
        return True

    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._cancelled)

    def configure(self, *, b: int) -> None:
        if not 1 <= b <= self.b_max:
            raise ValueError(f"b: 1 to {self.b_max} expected, {b} given")
        self._b = b

    def use_threads(self, count: int) -> None:
        """Nothing is computed, so no thread is used."""

    # ------------------------------------------------------------ one iteration

    async def step(self) -> StepReport:
        started = self._admit()
        decoding = [s for s in self._running.values() if not s.to_prefill]
        chunks = self._chunks(len(decoding))
        seconds = self._seconds(len(decoding), sum(n for _, n in chunks), started)
        await self._pass(seconds)
        now = self._now()
        outputs: list[tuple[str, Output]] = []
        finished = [self._finished(s, "cancelled") for s in self._cancelled]
        self._cancelled.clear()
        first = []
        for sequence, tokens in chunks:
            sequence.to_prefill -= tokens
            if not sequence.to_prefill:
                sequence.stamps[Stamp.FIRST_TOKEN] = now
                first.append(sequence)
        for sequence in (*decoding, *first):
            self._emit(sequence, now, outputs, finished)
        if self._options.batching == "static":
            outputs, finished = self._hold(outputs, finished, now)
        return StepReport(
            outputs=tuple(outputs),
            finished=tuple(finished),
            seconds=seconds / self._options.time_scale,
            b=len(decoding) + len(chunks),
            prefill_tokens=sum(n for _, n in chunks),
            decode_tokens=len(decoding),
        )

    def _hold(
        self, outputs: list[tuple[str, Output]], finished: list[Finished], now: float
    ) -> tuple[list[tuple[str, Output]], list[Finished]]:
        """A static batch answers when its last member is done, all at once."""
        self._held.extend(outputs)
        self._held_finished.extend(f for f in finished if f.reason != "cancelled")
        if self._running:
            return [], [f for f in finished if f.reason == "cancelled"]
        for _, output in self._held:
            if output.finish is not None:
                output.stamps.update({Stamp.FIRST_TOKEN: now, Stamp.FINISHED: now})
        gone = [f for f in finished if f.reason == "cancelled"]
        outputs, finished = self._held, [*self._held_finished, *gone]
        self._held, self._held_finished, self._batch = [], [], 0
        return outputs, finished

    def _admit(self) -> list[Sequence]:
        """Move waiting requests into the running set, in order, while limits allow."""
        if self._options.batching == "static" and self._running:
            return []
        started = []
        now = self._now()
        while self._waiting and len(self._running) < self._b:
            sequence = self._next_waiting()
            if sequence is None or self._kv_used + sequence.reserved > self._kv_total:
                break
            self._waiting.remove(sequence)
            self._kv_used += sequence.reserved
            sequence.stamps[Stamp.STARTED] = now
            self._running[sequence.request.id] = sequence
            started.append(sequence)
        self._batch += len(started)
        return started

    def _next_waiting(self) -> Sequence | None:
        """The oldest; with merged adapters the oldest that the merged adapter can serve."""
        if self._options.lora != "merged" or not self._running:
            return self._waiting[0]
        adapter = next(iter(self._running.values())).request.adapter
        return next((s for s in self._waiting if s.request.adapter == adapter), None)

    def _chunks(self, decoding: int) -> list[tuple[Sequence, int]]:
        """Prompt tokens to prefill in this iteration, oldest first, within the step's budget."""
        room = self._options.max_step_tokens - decoding
        if self._options.batching == "static":
            room = self._kv_total
        chunks = []
        for sequence in self._running.values():
            if sequence.to_prefill and room > 0:
                tokens = min(sequence.to_prefill, room)
                room -= tokens
                chunks.append((sequence, tokens))
        return chunks

    def _seconds(self, decoding: int, prefill: int, started: list[Sequence]) -> float:
        """Emulated duration of the iteration."""
        model: LatencyModel = self._profile.coefficients
        B = self._beside()
        seconds = 0.0
        if decoding:
            # A padded batch computes its finished rows to the end.
            rows = self._batch if self._options.batching == "static" else decoding
            seconds += model.t_infer(rows, B)
            if self._options.lora == "merged":
                seconds /= self._profile.merged_speedup
        if prefill:
            seconds += model.t_prefill(prefill, B)
        if self._profile.jitter and seconds:
            seconds *= self._random.lognormvariate(0.0, self._profile.jitter)
        return seconds + sum(self._adapters.seconds(s.request.adapter, s.version) for s in started)

    async def _pass(self, seconds: float) -> None:
        """Let the time go by. Consecutive steps keep an absolute schedule, so lag never adds up."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        real = seconds / self._options.time_scale
        now = time.monotonic()
        # A step that follows at once begins where the last one ended on paper.
        begin = self._due if now - self._due < min(real, 0.05) else now
        self._due = begin + real
        await self._alarm.until(self._due)
        self.lag.add(time.monotonic() - self._due, real)

    def _emit(
        self,
        sequence: Sequence,
        now: float,
        outputs: list[tuple[str, Output]],
        finished: list[Finished],
    ) -> None:
        """One more token of a sequence; its last one frees its memory."""
        request = sequence.request
        token = self._words[(sequence.key + sequence.delivered) % len(self._words)]
        offset = sequence.delivered
        sequence.delivered += 1
        reason = None
        if sequence.delivered >= sequence.length:
            reason = "length" if sequence.delivered >= request.sampling.max_tokens else "stop"
            sequence.stamps[Stamp.FINISHED] = now
            del self._running[request.id]
            self._kv_used -= sequence.reserved
            finished.append(self._finished(sequence, reason))
        output = Output(
            id=request.id,
            attempt=request.attempt,
            offset=offset,
            tokens=(token,),
            finish=reason,
            adapter_version=sequence.version,
            stamps=sequence.stamps if reason else {},
        )
        outputs.append((request.gateway, output))

    @staticmethod
    def _finished(sequence: Sequence, reason: str) -> Finished:
        request, stamps = sequence.request, sequence.stamps
        return Finished(
            *(request.id, request.attempt, len(request.prompt), sequence.delivered, reason),
            started=stamps.get(Stamp.STARTED, 0.0),
            first_token=stamps.get(Stamp.FIRST_TOKEN, 0.0),
        )

    # ------------------------------------------------------------ adapters

    def load_adapter(self, name: str, version: str, path: str, *, current: bool = True) -> None:
        """Only names are kept: an emulated adapter has no tensors."""
        self._adapters.load(name, version, current=current)

    def unload_adapter(self, name: str) -> bool:
        return self._adapters.unload(name)

    def has_adapter(self, name: str, version: str | None = None) -> bool:
        return self._adapters.has(name, version)

    # ------------------------------------------------------------ state

    def status(self) -> EngineStatus:
        return EngineStatus(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=self._kv_used,
            kv_total=self._kv_total,
            b_limit=self._b,
            adapters=dict(self._adapters.current),
        )

    def close(self) -> None:
        self._alarm.close()
        self._running.clear()
        self._waiting.clear()
