"""One simulated replica: the batching of the emulated engine on virtual time.

Requests join and leave between iterations, prompts are prefilled in chunks beside running
decodes, KV memory is reserved before a request starts. While only decodes run, the batch does
not change until its next member ends, so all iterations up to there are one span: the number
of events grows with requests, not with tokens. A release in mid-span cuts it at the next
iteration boundary.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict, deque

import msgspec

from services.replica.pace import beside_decodes
from shared.profile import Profile
from sim.dynamic import Dynamic
from sim.job import Job
from sim.training import Trainer


class Batching(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a replica forms batches, as ``services.replica.engines.emulated`` does."""

    batching: str = "continuous"  # or "static": a batch runs to its end
    # "merged": one adapter at a time, at the base's speed; "dynamic": as dLoRA decides
    lora: str = "unmerged"
    max_step_tokens: int = 512
    jitter: bool = True
    # Longest step with prompts beside decodes, as the torch engine keeps it; None: no such limit.
    step_seconds: float | None = None


class Span:
    """Iterations that run now: ``steps`` of ``seconds`` each, the first from ``start``."""

    __slots__ = ("B", "chunks", "decoding", "seconds", "start", "steps")

    def __init__(
        self,
        start: float,
        steps: int,
        seconds: float,
        decoding: int,
        chunks: list[tuple[Job, int]],
        B: int = 0,
    ) -> None:
        self.start, self.steps, self.seconds = start, steps, seconds
        self.decoding, self.chunks, self.B = decoding, chunks, B

    @property
    def end(self) -> float:
        return self.start + self.steps * self.seconds


class Replica:
    """``span`` is None while nothing runs; ``generation`` outdates events of a cut span."""

    def __init__(
        self, name: str, row: str, profile: Profile, batching: Batching, b_limit: int, seed: int
    ) -> None:
        self.name, self.row, self.profile, self.batching = name, row, profile, batching
        self.latency = profile.coefficients
        self.b_limit = b_limit
        self.kv_used = 0
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.decoding: list[tuple[int, int, Job]] = []  # heap by the iteration of the last token
        self.iteration = 0
        self.span: Span | None = None
        self.generation = 0
        self.busy = 0.0
        self.trainer: Trainer | None = None
        self._order = 0
        self._static = batching.batching == "static"
        self._batch = 0  # rows of the running static batch, finished ones included
        self._held: list[Job] = []  # done, told when their static batch is
        self._random = random.Random(seed)
        self._cv = profile.jitter if batching.jitter else 0.0
        self._noise_mean = math.exp(self._cv**2 / 2)
        self._slots: OrderedDict[str, None] = OrderedDict()
        self._merged: str | None = None
        self._adapter_now: str | None = None
        self._dynamic = Dynamic(profile) if batching.lora == "dynamic" else None

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def busy_until(self, now: float) -> float:
        """Seconds in which an iteration ran, up to ``now``."""
        return self.busy + (0.0 if self.span is None else max(0.0, now - self.span.start))

    # ------------------------------------------------------------ requests

    def accept(self, jobs: list[Job], now: float) -> float | None:
        """Take requests that arrive now; the new time of the next turn if that changed."""
        self.waiting.extend(jobs)
        span = self.span
        if span is None:
            self.generation += 1
            return now
        if span.chunks or span.steps == 1 or not self._may_admit():
            return None  # its next boundary is early enough (prompts go oldest first)
        steps = max(1, math.ceil((now - span.start) / span.seconds - 1e-9))
        if steps >= span.steps:
            return None
        span.steps = steps
        self.generation += 1
        return span.end

    def take_back(self, ids: set[str]) -> list[Job]:
        """Drop requests wherever they are (Shepherd's preemption); what they had is lost."""
        taken = [j for j in self.waiting if j.request.id in ids]
        self.waiting = deque(j for j in self.waiting if j.request.id not in ids)
        running = [j for j in self.prefilling if j.request.id in ids]
        self.prefilling = [j for j in self.prefilling if j.request.id not in ids]
        running += [j for _, _, j in self.decoding if j.request.id in ids]
        self.decoding = [entry for entry in self.decoding if entry[2].request.id not in ids]
        heapq.heapify(self.decoding)
        if self._dynamic is not None:
            running += self._dynamic.take_back(ids)
        for job in running:
            self.kv_used -= job.kv
        if self.span is not None:
            self.span.chunks = [c for c in self.span.chunks if c[0].request.id not in ids]
        return [*taken, *running]

    # ------------------------------------------------------------ iterations

    def complete(self, now: float) -> list[Job]:
        """The span has ended: first tokens, last tokens; returns who finished."""
        span = self.span
        if span is None:
            return []
        self.span = None
        self.iteration += span.steps
        if self._dynamic is not None:
            self._dynamic.repeated(span.steps - 1)
        self.busy += now - span.start
        finished: list[Job] = []
        for job, tokens in span.chunks:
            job.to_prefill -= tokens * span.steps
            if job.to_prefill <= 0:
                job.first_token = now
                self.prefilling.remove(job)
                if job.output <= 1:
                    finished.append(job)
                else:
                    self._order += 1
                    job.finish_at = self.iteration + job.output - 1
                    heapq.heappush(self.decoding, (job.finish_at, self._order, job))
        heap = self.decoding
        while heap and heap[0][0] <= self.iteration:
            finished.append(heapq.heappop(heap)[2])
        for job in finished:
            self.kv_used -= job.kv
        return self._hold(finished, now) if self._static else finished

    def _hold(self, finished: list[Job], now: float) -> list[Job]:
        """A static batch answers when its last member is done, all at once."""
        self._held += finished
        if self.running:
            return []
        answered, self._held, self._batch = self._held, [], 0
        for job in answered:
            job.first_token = now
        return answered

    def plan(self, now: float) -> float | None:
        """Start the next span; the time at which it ends, None when there is no work."""
        extra = self._next_batch(now)
        decoding = len(self.decoding)
        if not decoding and not self.prefilling:
            if self.trainer is not None:
                self.trainer.beside(0, now)
            return None
        B = 0 if self.trainer is None else self.trainer.beside(decoding, now, self)
        chunks: list[tuple[Job, int]] = []
        seconds, steps = extra, 1
        if decoding:
            seconds += self._decode_seconds(decoding, B)
            steps = self.decoding[0][0] - self.iteration
        if self.prefilling:
            chunks, tokens = self._chunks(decoding)
        if chunks:  # none where decodes alone fill a step
            seconds += self.latency.t_prefill(tokens, B)
            whole = chunks[0][0].to_prefill // tokens  # iterations that are all this prompt's
            steps = 1 if extra or whole < 1 else min(steps, whole) if decoding else whole
        if self._dynamic is not None and (extra or chunks or not self._dynamic.steady):
            steps = 1
        if self._cv:
            seconds *= self._noise(steps)
        self.span = Span(now, steps, seconds, decoding, chunks, B)
        return now + steps * seconds

    def _decode_seconds(self, decoding: int, B: int) -> float:
        # A padded batch computes its finished rows to the end.
        seconds = self.latency.t_infer(self._batch if self._static else decoding, B)
        merged = self.batching.lora == "merged" if self._dynamic is None else self._dynamic.merged
        return seconds / self.profile.merged_speedup if merged else seconds

    def _noise(self, steps: int) -> float:
        """Mean of ``steps`` log-normal factors, by its first two moments."""
        spread = self._cv if steps == 1 else self._cv / math.sqrt(steps)
        return max(0.05, self._noise_mean * (1.0 + self._random.gauss(0.0, spread)))

    def _chunks(self, decoding: int) -> tuple[list[tuple[Job, int]], int]:
        """Prompt tokens of this iteration, oldest first, within the budget of a step."""
        room = self.profile.kv_tokens if self._static else self.batching.max_step_tokens - decoding
        if decoding and self.batching.step_seconds is not None:
            room = min(room, self._beside(decoding, self.batching.step_seconds))
        chunks: list[tuple[Job, int]] = []
        total = 0
        for job in self.prefilling:
            if room <= 0:
                break
            tokens = min(job.to_prefill, room)
            room -= tokens
            total += tokens
            chunks.append((job, tokens))
        return chunks, total

    def _beside(self, decoding: int, step_seconds: float) -> int:
        """Prompt tokens beside decodes for which the step does not become too long."""
        tpots = (job.request.tpot for _, _, job in self.decoding)
        limits = [1e3 * tpot for tpot in tpots if tpot is not None]
        base = self._decode_seconds(decoding, 0)
        return beside_decodes(base, self.latency.pi1, step_seconds, limits)

    # ------------------------------------------------------------ admission

    def _may_admit(self) -> bool:
        if self._static:
            return False
        job = self.waiting[0]
        fits = self.kv_used + job.kv <= self.profile.kv_tokens
        free = self._dynamic is not None or self.running < self.b_limit  # dynamic: decided anew
        return fits and free and self._joins(job)

    def _joins(self, job: Job) -> bool:
        """With merged adapters only requests of the adapter that runs now."""
        if self.batching.lora != "merged" or not self.running:
            return True
        return job.request.adapter == self._adapter_now

    def _next_batch(self, now: float) -> float:
        """Let in who may run from now on; seconds for adapters they need first."""
        if self._dynamic is None:
            return self._admit(now) if self.waiting else 0.0
        switch, adapters = self._dynamic.choose(self, now)
        return switch + sum(self._adapter_seconds(adapter) for adapter in adapters)

    def _admit(self, now: float) -> float:
        """Move waiting requests into the batch; seconds for adapters they need first."""
        if self._static and self.running:
            return 0.0
        extra, total = 0.0, self.profile.kv_tokens
        while self.waiting and self.running < self.b_limit:
            job = self._next_waiting()
            if job is None or self.kv_used + job.kv > total:
                break
            self.waiting.remove(job)  # the first in line unless adapters are merged
            self.kv_used += job.kv
            job.started = now
            self._adapter_now = job.request.adapter
            self.prefilling.append(job)
            self._batch += 1
            extra += self._adapter_seconds(job.request.adapter)
        return extra

    def _next_waiting(self) -> Job | None:
        """The oldest; with merged adapters the oldest that the merged adapter can serve."""
        if self.batching.lora != "merged":
            return self.waiting[0]
        return next((j for j in self.waiting if self._joins(j)), None)

    def _adapter_seconds(self, adapter: str | None) -> float:
        """Time to switch to or fetch an adapter; 0 when it is there."""
        seconds = 0.0
        if self.batching.lora == "merged" and adapter != self._merged:
            self._merged = adapter
            seconds += self.profile.merge_seconds
        if adapter is None:
            return seconds
        if adapter not in self._slots:
            seconds += self.profile.adapter_seconds
            if len(self._slots) >= self.profile.adapter_slots:
                self._slots.popitem(last=False)
        self._slots[adapter] = None
        self._slots.move_to_end(adapter)
        return seconds
