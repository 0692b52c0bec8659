"""A request that waits, with what the pacing policy has worked out about it once, at arrival."""

from __future__ import annotations

import math

from services.dispatcher.policies.base import Request

MAIN, DEFERRED, LATE, GONE = range(4)  # which queue it is in
CHUNK = 512  # prompt tokens that an engine takes in one step at most


class Waiting:
    """Seconds, tokens. ``latest`` is the moment at which its slack is used up."""

    __slots__ = (
        "arrived",
        "bound",
        "chunks",
        "cost",
        "density",
        "due",
        "kv",
        "late",
        "latest",
        "least",
        "output",
        "place",
        "plain",
        "prompt",
        "request",
        "stretch",
    )

    def __init__(
        self,
        request: Request,
        output: float,
        cost: float,
        latest: float,
        now: float,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        """``bounds``: output tokens that it will have at any rate, and hardly exceed."""
        self.request = request
        self.output = output  # tokens expected
        least, most = bounds or (output, output)
        self.least = min(least, output)  # tokens that it will probably have at any rate
        # By what share of them it may hardly become longer than expected.
        self.stretch = max(0.0, most / output - 1.0) if output > 0 else 0.0
        self.cost = cost  # replica seconds it takes
        self.density = output / cost if cost > 0 else math.inf
        self.latest = latest
        self.kv = request.prompt_tokens + request.max_tokens
        self.place = GONE  # until it is queued
        self.late = False  # released although it cannot make it
        self.arrived = now
        self.prompt = request.prompt_tokens
        self.chunks = -(-request.prompt_tokens // CHUNK)  # engine steps that its prompt takes
        self.due = math.inf if request.deadline is None else request.deadline
        self.plain = request.tpot is None and request.ttft_deadline is None
        self.bound = not (  # whether it has any limit to keep
            request.deadline is None and request.ttft_deadline is None and request.tpot is None
        )

    def due_after(self, first_token: float) -> float:
        """By when its last token is due if its first one comes then; infinite without a SLO."""
        tpot = self.request.tpot
        if tpot is not None and self.output > 1:
            return min(self.due, first_token + tpot * (self.output - 1))
        return self.due

    def met(self, first: float, end: float, margin: float) -> bool:
        """Whether these times keep every limit."""
        ttft = self.request.ttft_deadline
        if ttft is not None and first + margin > ttft:
            return False
        return end + margin <= self.due_after(first)


Item = tuple[float, float, int, Waiting]  # of a heap: two keys, order of entry, the request
