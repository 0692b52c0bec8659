"""An engine that computes nothing and takes its time from a hardware profile.

The batching is that of the real engine: requests join and leave at any iteration, prompts are
prefilled in chunks beside running decodes, KV memory is reserved before a request starts. Only
the forward pass is replaced by a pause of T_prefill + T_infer (shared.latency). No torch, so
many replicas run in one process. Everything it produces is marked as emulated.

Baselines: ``static`` batching runs a batch to its end before the next one starts (Transformers +
PEFT); ``merged`` adapters serve one adapter at a time at the speed of the base and pay a switch;
``dynamic``: dLoRA's rule (OSDI'24) decides in each iteration what is merged and who runs.
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
from services.replica.engines.emulated_static import StaticBatch
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
    lora: str = "unmerged"  # or "merged", "dynamic": see the module
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
        self._adapters = EmulatedAdapters(profile, options.lora)
        self._came = 0  # requests so far
        self._random = random.Random(options.seed)
        self._due = 0.0
        self._static = StaticBatch() if options.batching == "static" else None

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
        self._came += 1
        self._waiting.append(Sequence(request, length, key, version, self._came))

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
        batch, fetching = self._choose() if self._options.lora == "dynamic" else self._admit()
        decoding = [s for s in batch if not s.to_prefill]
        chunks = self._chunks(batch, len(decoding))
        seconds = self._seconds(len(decoding), sum(n for _, n in chunks)) + fetching
        await self._pass(seconds)
        now = self._now()
        outputs: list[tuple[str, Output]] = []
        finished = [s.finished("cancelled") for s in self._cancelled]
        self._cancelled.clear()
        first = []
        for sequence, tokens in chunks:
            sequence.to_prefill -= tokens
            if not sequence.to_prefill:
                sequence.stamps[Stamp.FIRST_TOKEN] = now
                first.append(sequence)
        for sequence in (*decoding, *first):
            self._emit(sequence, now, outputs, finished)
        if self._static is not None:
            ended = not self._running
            outputs, finished = self._static.hold(outputs, finished, now, ended=ended)
        return StepReport(
            outputs=tuple(outputs),
            finished=tuple(finished),
            seconds=seconds / self._options.time_scale,
            b=len(decoding) + len(chunks),
            prefill_tokens=sum(n for _, n in chunks),
            decode_tokens=len(decoding),
        )

    def _admit(self) -> tuple[list[Sequence], float]:
        """Let waiting requests in, in order, while limits allow: all that run, and the seconds
        that the new ones' adapters take."""
        if self._static is not None and self._running:
            return list(self._running.values()), 0.0
        started = []
        while self._waiting and len(self._running) < self._b:
            sequence = self._next_waiting()
            if sequence is None or self._kv_used + sequence.reserved > self._kv_total:
                break
            self._start(sequence)
            started.append(sequence)
        if self._static is not None:
            self._static.rows += len(started)
        return list(self._running.values()), self._adapters.seconds(started)

    def _choose(self) -> tuple[list[Sequence], float]:
        """Who runs in this iteration, of all that have begun or have memory to begin; the others
        pause and keep their memory. And the seconds that adapters take."""
        queue, free = list(self._running.values()), self._kv_total - self._kv_used
        for sequence in self._waiting:
            free -= sequence.reserved
            if free < 0:
                break
            queue.append(sequence)
        if not queue:
            return [], 0.0
        batch, seconds = self._adapters.choose(sorted(queue, key=lambda s: s.order), self._b)
        for sequence in batch:
            if sequence.request.id not in self._running:
                self._start(sequence)
        return batch, seconds

    def _start(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._kv_used += sequence.reserved
        sequence.stamps[Stamp.STARTED] = self._now()
        self._running[sequence.request.id] = sequence

    def _next_waiting(self) -> Sequence | None:
        """The oldest; with merged adapters the oldest that the merged adapter can serve."""
        if self._options.lora != "merged" or not self._running:
            return self._waiting[0]
        adapter = next(iter(self._running.values())).request.adapter
        return next((s for s in self._waiting if s.request.adapter == adapter), None)

    def _chunks(self, batch: list[Sequence], decoding: int) -> list[tuple[Sequence, int]]:
        """Prompt tokens to prefill in this iteration, oldest first, within the step's budget."""
        room = self._options.max_step_tokens - decoding
        if self._static is not None:
            room = self._kv_total
        chunks = []
        for sequence in batch:
            if sequence.to_prefill and room > 0:
                tokens = min(sequence.to_prefill, room)
                room -= tokens
                chunks.append((sequence, tokens))
        return chunks

    def _seconds(self, decoding: int, prefill: int) -> float:
        """Emulated duration of the iteration, with its adapters there."""
        model: LatencyModel = self._profile.coefficients
        B = self._beside()
        seconds = 0.0
        if decoding:
            # A padded batch computes its finished rows to the end.
            rows = decoding if self._static is None else self._static.rows
            seconds += model.t_infer(rows, B) / self._adapters.speedup
        if prefill:
            seconds += model.t_prefill(prefill, B)
        if self._profile.jitter and seconds:
            seconds *= self._random.lognormvariate(0.0, self._profile.jitter)
        return seconds

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
        output = sequence.deliver(self._words)
        if output.finish is not None:
            sequence.stamps[Stamp.FINISHED] = now
            del self._running[output.id]
            self._kv_used -= sequence.reserved
            finished.append(sequence.finished(output.finish))
        outputs.append((sequence.request.gateway, output))

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
