"""What a dispatch policy sees and says.

A policy is pure: it is told events with their time, keeps its own books, and returns decisions.
It knows no Redis and no clock, so the same object runs in the dispatcher service, in the
simulator and in unit tests. One file a policy; ``services.dispatcher.policies.registry`` names
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from shared.latency import LatencyModel


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A queued request as a policy sees it. Times in seconds, lengths in tokens."""

    id: str
    arrival: float
    prompt_tokens: int
    max_tokens: int
    adapter: str | None = None
    adapter_version: str | None = None
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None  # end of the end-to-end SLO
    ttft_deadline: float | None = None  # moment by which its first token is due
    tpot: float | None = None  # seconds per output token
    attempt: int = 1
    fresh: bool = True  # came straight from its gateway: ``arrival`` tells how long the way took


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as a policy sees it; a new one is told whenever something changed."""

    id: str
    dispatchable: bool  # Serving or Combined, alive
    idle: bool = False  # alive and Idle: may be promoted
    training: bool = False  # Combined
    b_limit: int = 1  # concurrency in force on the replica
    b_max: int = 1  # what its KV memory carries
    B: int = 0  # micro-batch in force
    B_wanted: int = 0
    kv_total: int = 0
    context: int = 0
    adapters: Mapping[str, str] = {}
    quality: float = 1.0
    latency: LatencyModel | None = None  # from the coordinator; None: none yet


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A released request that left its replica."""

    id: str
    replica: str
    output_tokens: int
    reason: str  # stop | length | cancelled | failed | lost


class StepSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A step a replica reported; policies that fit latencies themselves use it."""

    replica: str
    seconds: float
    steps: int
    b: int
    B: int
    prefill_tokens: int
    decode_tokens: int
    waiting: int = 0
    kv_used: int = 0


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Put these requests, as one batch, into the replica's stream."""

    replica: str
    requests: tuple[str, ...]
    why: Mapping[str, float | str] = {}  # the decision's numbers, for `collm why`


class Shed(msgspec.Struct, frozen=True, kw_only=True):
    """Refuse a queued request; its client gets 503 with retry-after (seconds)."""

    request: str
    reason: str
    retry_after: float


class Promote(msgspec.Struct, frozen=True, kw_only=True):
    """Move an Idle replica to Serving: load needs it."""

    replica: str
    why: Mapping[str, float | str] = {}


class Suspend(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the coordinator for B = 0 on Combined replicas, or take the request back."""

    replicas: tuple[str, ...]
    wanted: bool


class Preempt(msgspec.Struct, frozen=True, kw_only=True):
    """Take unfinished requests back from a replica (Shepherd): they are queued again."""

    replica: str
    requests: tuple[str, ...]


Action = Release | Shed | Promote | Suspend | Preempt


@runtime_checkable
class Policy(Protocol):
    """The interface. Every method is called from one thread; ``now`` never goes backwards.

    The caller guarantees: ``on_arrival`` once a request (again only after it came back by a
    ``lost`` completion and resubmission); every Release it is given is carried out before the
    next call, or each refused member is reported by ``on_completion`` with reason "failed".
    """

    name: str

    def on_arrival(self, request: Request, now: float) -> None: ...

    def on_cancel(self, request_id: str, now: float) -> bool:
        """Forget a queued request; False when it is not in the queue (released or unknown)."""
        ...

    def on_replica(self, replica: ReplicaView, now: float) -> None: ...

    def on_replica_gone(self, replica_id: str, now: float) -> None:
        """Its released requests are no longer in flight; those still wanted arrive anew."""
        ...

    def on_completion(self, completion: Completion, now: float) -> None: ...

    def on_step(self, step: StepSeen, now: float) -> None: ...

    def restore(self, replica_id: str, requests: Sequence[Request], now: float) -> None:
        """After a restart of the dispatcher: these are in flight on the replica already."""
        ...

    def decide(self, now: float) -> list[Action]:
        """Everything that should happen now; called after events and at ``next_wake``."""
        ...

    def next_wake(self, now: float) -> float | None:
        """When ``decide`` wants to be called even if nothing happens; None: never."""
        ...

    def queued(self) -> int:
        """Requests waiting for a release."""
        ...
