"""Books that every policy keeps: replicas as last told, what is in flight on each, eligibility."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from services.dispatcher.policies.base import Completion, ReplicaView, Request


def tokens(request: Request) -> int:
    """What it may come to hold in a replica's memory."""
    return request.prompt_tokens + request.max_tokens


class Member:
    """A replica with what is in flight on it."""

    __slots__ = ("flight", "view")

    def __init__(self, view: ReplicaView) -> None:
        self.view = view
        self.flight: dict[str, Request] = {}

    @property
    def load(self) -> int:
        return len(self.flight)

    @property
    def credit(self) -> int:
        """Requests it may still take at its limit in force."""
        return self.view.b_limit - len(self.flight)

    @property
    def size(self) -> float:
        """Tokens of the largest request that it could ever serve: context and KV memory."""
        view = self.view
        return min(view.context or math.inf, view.kv_total or math.inf)  # 0: not known

    def fits(self, request: Request) -> bool:
        """Whether it could ever serve the request."""
        return tokens(request) <= self.size

    def holds(self, request: Request) -> bool:
        """Whether the request's adapter is resident (any base request: yes)."""
        return request.adapter is None or request.adapter in self.view.adapters


class Fleet:
    """All replicas of one model. Iterates over members in order of id."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._where: dict[str, Member] = {}  # request -> where it is in flight

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._members

    def __getitem__(self, replica_id: str) -> Member:
        return self._members[replica_id]

    def get(self, replica_id: str) -> Member | None:
        return self._members.get(replica_id)

    def tell(self, view: ReplicaView) -> Member:
        """A replica is new or changed."""
        member = self._members.get(view.id)
        if member is not None:
            member.view = view
            return member
        member = self._members[view.id] = Member(view)
        self._members = dict(sorted(self._members.items()))
        return member

    def drop(self, replica_id: str) -> list[Request]:
        """A replica is gone; returns what was in flight on it."""
        member = self._members.pop(replica_id, None)
        if member is None:
            return []
        for request_id in member.flight:
            del self._where[request_id]
        return list(member.flight.values())

    def assign(self, member: Member, requests: Iterable[Request]) -> None:
        for request in requests:
            member.flight[request.id] = request
            self._where[request.id] = member

    def finish(self, completion: Completion) -> tuple[Member, Request] | None:
        """Take a finished request off its replica; None when it is not in flight (any more)."""
        member = self._where.get(completion.id)
        if member is None or member.view.id != completion.replica:
            return None
        del self._where[completion.id]
        request = member.flight.pop(completion.id)
        return member, request

    def dispatchable(self) -> list[Member]:
        return [m for m in self._members.values() if m.view.dispatchable]

    def idle(self) -> list[Member]:
        return [m for m in self._members.values() if m.view.idle]
