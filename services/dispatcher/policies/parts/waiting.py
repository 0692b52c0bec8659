"""A request that waits, with what the pacing policy has worked out about it once, at arrival."""

from __future__ import annotations

import math

from services.dispatcher.policies.base import Request

MAIN, DEFERRED, LATE, GONE, APART = range(5)  # which queue it is in
CHUNK = 512  # prompt tokens that an engine takes in one step at most


class Waiting:
    """Seconds, tokens. ``latest`` is the moment at which its slack is used up."""

    __slots__ = (
        "arrived",
        "bound",
        "charged",
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
        self.charged = 0  # to its tenant's share; 0: it was not
        self.arrived = now
        self.prompt = request.prompt_tokens
        self.chunks = -(-request.prompt_tokens // CHUNK)  # engine steps that its prompt takes
        self.due = math.inf if request.deadline is None else request.deadline
        self.plain = request.tpot is None and request.ttft_deadline is None
        self.bound = not (  # whether it has any limit to keep
            request.deadline is None and request.ttft_deadline is None and request.tpot is None
        )

    def due_after(self, first: float, end: float) -> float:
        """By when its last token is due if its first one comes at ``first``; infinite: no limit.

        ``end``: as predicted, a step for each token. Between the first and the last one there is a
        step less, and that is what a limit on the time per token is about.
        """
        tpot, output = self.request.tpot, self.output
        if tpot is not None and output > 1:
            return min(self.due, first + tpot * (output - 1) + (end - first) / output)
        return self.due

    def met(self, first: float, end: float, margin: float) -> bool:
        """Whether these times keep every limit."""
        ttft = self.request.ttft_deadline
        if ttft is not None and first + margin > ttft:
            return False
        return end + margin <= self.due_after(first, end)


Item = tuple[float, float, int, Waiting]  # of a heap: two keys, order of entry, the request
