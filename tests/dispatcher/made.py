"""Requests, replicas and completions as policies see them, with what a test does not care for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.dispatcher.policies.base import (
    Action,
    Completion,
    Policy,
    Preempt,
    Release,
    ReplicaView,
    Request,
)


def request(key: str = "q", **changes: Any) -> Request:
    """100 prompt tokens, at most 10 tokens of answer, no limit; arrived at 0."""
    values: dict[str, Any] = {"id": key, "arrival": 0.0, "prompt_tokens": 100, "max_tokens": 10}
    return Request(**(values | changes))


def view(key: str = "r", **changes: Any) -> ReplicaView:
    """A replica that serves two requests at a time."""
    values: dict[str, Any] = {"id": key, "dispatchable": True, "b_limit": 2, "b_max": 8}
    return ReplicaView(**(values | changes))


def done(key: str = "q", replica: str = "r", tokens: int = 10, reason: str = "stop") -> Completion:
    return Completion(id=key, replica=replica, output_tokens=tokens, reason=reason)


def told(policy: Policy, *views: ReplicaView) -> None:
    """The policy hears of the replicas at 0."""
    for each in views:
        policy.on_replica(each, 0.0)


def ask(policy: Policy, *requests: Request, now: float = 0.0) -> list[Action]:
    """The requests arrive; what the policy decides then."""
    for each in requests:
        policy.on_arrival(each, now)
    return policy.decide(now)


def where(actions: Sequence[Action]) -> dict[str, tuple[str, ...]]:
    """Requests by the replica they were released to."""
    return {a.replica: a.requests for a in actions if isinstance(a, Release)}


def taken_back(actions: Sequence[Action]) -> dict[str, tuple[str, ...]]:
    """Requests by the replica they are taken back from."""
    return {a.replica: a.requests for a in actions if isinstance(a, Preempt)}
