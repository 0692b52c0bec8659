"""How long training may delay serving before a running request misses a limit.

Pure. Every running request allows a delay: what is left of its limit after the time it still
needs at the present speed of a step. The least of them is the slack. A request without limits is
protected too: it may be slowed by ``TOLERANCE`` against its speed without training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from services.replica.books import Member
from shared.messages import Generate

TOLERANCE = 0.25  # relative rise of time per token that a request without a SLO bears


def slack(members: Iterable[Member], now: float, step: float) -> float:
    """Seconds; inf when nothing runs. ``step`` is the seconds of a step without training."""
    return min((_allowed(member, now, step) for member in members), default=math.inf)


def _allowed(member: Member, now: float, step: float) -> float:
    request = member.request
    left = max(0, request.sampling.max_tokens - member.delivered)
    need = left * step
    allowed = math.inf
    if request.deadline is not None:
        allowed = request.deadline - now - need
    if member.first_token is None:
        if request.slo.ttft_ms is not None:
            allowed = min(allowed, request.arrival + request.slo.ttft_ms / 1e3 - now - step)
        return allowed if _limited(request) else min(allowed, TOLERANCE * step)
    per_token = None
    if request.slo.tpot_ms is not None:
        per_token = request.slo.tpot_ms / 1e3
    elif not _limited(request):
        per_token = (1 + TOLERANCE) * step
    if per_token is not None:
        made = member.delivered - len(request.generated)
        budget = (made + left) * per_token
        allowed = min(allowed, budget - (now - member.first_token) - need)
    return allowed


def _limited(request: Generate) -> bool:
    return request.deadline is not None or bool(request.slo)
