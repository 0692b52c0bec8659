"""Least loaded: each request, in order of arrival, to the replica with fewest requests in flight.

The usual rule of load balancers ("least outstanding requests"; NGINX ``least_conn``), with a
credit of the replica's concurrency limit, and replicas that hold the adapter first.
"""

from __future__ import annotations

from services.dispatcher.policies.base import Request
from services.dispatcher.policies.fcfs import FirstCome
from services.dispatcher.policies.fleet import Member


class LeastLoaded(FirstCome):
    name = "least_loaded"

    def choose(self, request: Request, candidates: list[Member]) -> Member:
        return min(candidates, key=_load)


def _load(member: Member) -> float:
    return member.load / max(1, member.view.b_limit)
