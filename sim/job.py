"""A request on its way through the simulated cluster."""

from __future__ import annotations

from services.dispatcher.policies.base import Request
from shared.slo import Slo


class Job:
    """What the workload says of a request, and where it stands. Seconds, tokens."""

    __slots__ = (
        "attempt",
        "came",
        "finish_at",
        "first_token",
        "held",
        "kv",
        "order",
        "output",
        "received",
        "replica",
        "request",
        "slo",
        "started",
        "tag",
        "to_prefill",
    )

    def __init__(self, request: Request, output: int, tag: str, slo: Slo, received: float) -> None:
        self.request = request
        self.output = output  # length of the answer, unknown to the policy
        self.tag = tag
        self.slo = slo
        self.received = received  # when the gateway had it
        self.kv = request.prompt_tokens + request.max_tokens
        self.attempt = 1
        self.came = 0.0  # what the clock of credit showed when it was queued
        self.held = 0.0  # seconds it was kept back on purpose
        self.reset()

    def reset(self) -> None:
        """Back to the queue: nothing of it is computed."""
        self.replica = ""
        self.to_prefill = self.request.prompt_tokens
        self.started = -1.0
        self.first_token = -1.0
        self.finish_at = 0  # decode iteration of its replica at which its last token comes
        self.order = -1  # among all that its replica got, where that counts (sim.dynamic)
