"""A replica as the pacing policy foresees it: when its prompts are done, who finishes when.

The engine prefills prompts oldest first in chunks beside running decodes, so a prompt that is
added delays everything in flight by its own prefill time, and its own start by the prompts before
it. That gives each request in flight a predicted end, and the lane the slack of the tightest one,
in O(log b) a release.

A limit on the time per token is an average over the answer: one that may be short can be delayed
little at first, and for each token that it has got by as much more as the token came early.
"""

from __future__ import annotations

import heapq
import math

from services.dispatcher.policies.base import ReplicaView, StepSeen
from services.dispatcher.policies.parts.fit import work_of
from services.dispatcher.policies.parts.waiting import Waiting
from shared.latency import LatencyModel

BIAS_SMOOTHING = 0.1
QUALITY_LEAST = 1e-3  # of a replica; a quality of 0 would make every other choice equal
PACE_SECONDS = 1.0  # over so much time of steps the present speed is taken
SPEED_MOST = 4.0  # times as fast or slow as predicted
UNUSUAL = 0.1  # share by which it differs from what was predicted before anything is made of it
PACE_GRAIN = 0.01  # seconds; less of a gain is not worth a look
INFINITY = math.inf


class Running:
    """A released request: its predicted end, and what the lane's delay was at that moment."""

    __slots__ = ("end", "mark", "pace", "released", "start", "utmost", "waiting")

    def __init__(
        self, waiting: Waiting, released: float, start: float, end: float, mark: float
    ) -> None:
        self.waiting, self.released, self.start, self.end = waiting, released, start, end
        self.mark = mark
        self.pace = 0.0  # seconds of delay that a second of decoding makes up for; 0: no matter
        self.utmost = INFINITY  # the lane's delay at which it is late however long it gets


class Lane:
    """One replica. ``delay`` is the sum of delays that releases have caused so far.

    ``slack``: delay that every request in flight can still take (those late already left out).
    """

    __slots__ = (
        "B",
        "alpha0",
        "alpha1",
        "assumed",
        "background",
        "bias",
        "context",
        "delay",
        "flight",
        "kind",
        "kv",
        "kv_total",
        "latency",
        "pace",
        "pi0",
        "pi1",
        "prefill_end",
        "quality",
        "rank",
        "slack",
        "slacks",
        "speed",
        "standing",
        "view",
    )

    def __init__(self, view: ReplicaView) -> None:
        self.view = view
        self.latency: LatencyModel | None = None
        self.alpha0 = self.alpha1 = self.pi0 = self.pi1 = 0.0
        self.B = 0
        self.quality = 1.0
        self.flight: dict[str, Running] = {}
        self.kv = 0
        self.kv_total = self.context = INFINITY  # tokens; of its memory, of one request
        self.slack = INFINITY
        self.prefill_end = 0.0
        self.delay = 0.0
        self.slacks: list[tuple[float, str]] = []  # heap: delay at which a member is late
        self.background = 0  # hopeless requests in flight
        self.bias = 1.0  # actual over predicted time in the replica, smoothed
        self.speed = 1.0  # the same of the last second's steps
        self.pace = 1.0  # as much of that as is unusual
        self.assumed = 1.0  # bias times pace by which the ends in flight were predicted
        self.kind = 0  # replicas of one kind have the same coefficients, B and limit
        self.standing = 0.0  # Q times rate by which it is ordered
        self.rank = 0  # position in the order of Q times rate; beyond the active set: large

    def tell(self, view: ReplicaView, latency: LatencyModel | None) -> None:
        """Changed record or coefficients."""
        self.view, self.latency, self.B = view, latency, view.B
        self.quality = max(view.quality, QUALITY_LEAST)
        self.kv_total = view.kv_total or INFINITY
        self.context = view.context or INFINITY
        if latency is not None:
            self.alpha0 = latency.infer_fixed(view.B)
            self.alpha1 = latency.infer_slope(view.B)
            self.pi0 = latency.pi0 + latency.pi2 * view.B
            self.pi1 = latency.pi1

    @property
    def size(self) -> float:
        """Tokens of the largest request that it holds when it is empty."""
        return min(self.kv_total, self.context)

    # ------------------------------------------------------------ prediction

    def predict(self, w: Waiting, now: float) -> tuple[float, float, float]:
        """(first token, last token, delay to the others) if released now."""
        bias, b = self.bias * self.pace, len(self.flight)
        prefill = (self.pi1 * w.prompt + self.pi0 * w.chunks) * bias
        decode = w.output * self.alpha1 * bias
        iteration = (self.alpha0 + self.alpha1 * (b + 1)) * bias
        first = (self.prefill_end if self.prefill_end > now else now) + prefill
        if b:
            first += w.chunks * iteration
        return first, first + w.output * iteration, prefill + decode

    def room(self, need: int) -> bool:
        """Whether its KV memory and context carry a request of ``need`` tokens now."""
        return self.kv + need <= self.kv_total and need <= self.context

    # ------------------------------------------------------------ books

    def release(self, w: Waiting, now: float, safety: float = 0.0) -> float:
        """Put a request in flight; returns its predicted end.

        ``safety``: share of its time that is kept back from the slack it offers to others.
        """
        first, end, delay = self.predict(w, now)
        self.delay += delay
        key = w.request.id
        running = self.flight[key] = Running(w, now, first, end, self.delay)
        self.assumed += (self.bias * self.pace - self.assumed) / len(self.flight)
        self.kv += w.kv
        self.prefill_end = first
        due = w.due_after(first, end)
        if due < INFINITY and due >= end:
            kept = safety * (end - now)
            running.utmost = self.delay + max(0.0, due - end - kept)
            tpot = w.request.tpot
            if tpot is not None and w.least < w.output:
                running.pace = max(0.0, tpot * w.output / max(1e-9, end - first) - 1.0)
            limit = self._bears(running, first) if running.pace else running.utmost
            heapq.heappush(self.slacks, (limit, key))
        self.renew(now)
        if w.late:
            self.background += 1
        return end

    def saw(self, step: StepSeen, now: float) -> None:
        """A report of steps: how fast the replica is at present, and what that costs those in it.

        A neighbour on its host or a slower clock makes itself felt here seconds before the
        coefficients or an answer's end tell of it.
        """
        decodes, prefills = work_of(step)
        expected = self.alpha0 * decodes + self.alpha1 * step.decode_tokens
        expected += self.pi0 * prefills + self.pi1 * step.prefill_tokens
        if expected <= 0 or step.seconds <= 0:
            return
        ratio = min(SPEED_MOST, max(1 / SPEED_MOST, step.seconds / expected))
        self.speed += min(1.0, step.seconds / PACE_SECONDS) * (ratio - self.speed)
        usual = abs(self.speed - 1.0) < UNUSUAL
        self.pace = 1.0 if usual else self.speed
        if self.flight and not usual:
            lost = step.seconds - expected * self.assumed
            self.delay += lost
            if self.prefill_end > now:
                self.prefill_end += lost
            self.renew(now)

    def leave(
        self, key: str, now: float, *, learn: bool, tokens: float | None = None
    ) -> Running | None:
        """A request left; its actual time corrects the predictions of the others.

        ``tokens``: how many it got (as many as expected if not given): an answer that was shorter
        than expected says nothing about speed.
        """
        running = self.flight.pop(key, None)
        if running is None:
            return None
        self.kv -= running.waiting.kv
        if running.waiting.late:
            self.background -= 1
        if learn and running.waiting.prompt:  # since when one runs whose prompt was through is open
            delayed = self.delay - running.mark
            decoding = running.end - running.start
            if tokens is not None and running.waiting.output > 0:
                decoding *= tokens / running.waiting.output
            predicted = running.start + decoding + delayed - running.released
            actual = now - running.released
            # One that was delayed much says little about speed: an answer of few tokens ends
            # before all of a long prompt beside it is through.
            if predicted > 1e-4 and delayed < 0.1 * predicted:
                ratio = min(2.0, max(0.5, actual / predicted))
                self.bias = min(3.0, max(0.33, self.bias * (1 + BIAS_SMOOTHING * (ratio - 1))))
        if not self.flight:
            self.prefill_end = min(self.prefill_end, now)
            self.slacks.clear()
            self.delay = 0.0
        self.renew(now)
        return running

    def renew(self, now: float) -> None:
        """Work out the slack: that of the tightest that can still make it."""
        heap, flight, delay = self.slacks, self.flight, self.delay
        while heap:
            limit, key = heap[0]
            running = flight.get(key)
            if running is None:
                heapq.heappop(heap)
                continue
            if running.pace and limit < running.utmost:
                later = self._bears(running, now)
                if later > limit + PACE_GRAIN:
                    heapq.heapreplace(heap, (later, key))
                    continue
            if limit >= delay:
                break
            heapq.heappop(heap)
        self.slack = heap[0][0] - delay if heap else INFINITY

    def _bears(self, running: Running, now: float) -> float:
        """The lane's delay at which a request would be late if it had no more tokens than by now.

        It counts for as many as it has at any rate, if that is more.
        """
        w = running.waiting
        sure = (w.least - 1) / w.output * (running.end - running.start) if w.output > 0 else 0.0
        decoded = now - running.start - (self.delay - running.mark)
        ahead = running.pace * max(sure, decoded)
        return min(running.utmost, running.mark + ahead)
