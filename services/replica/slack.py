"""How long training may delay serving before a running request misses a limit.

Pure. Every running request allows a delay: what is left of its limit after the time it still
needs at the speed without training. The least of them is the slack. A request without limits is
protected too: its time per token may rise to that of slow requests without training, and by
``TOLERANCE`` beyond; until that is known, by ``TOLERANCE`` above a step.

A limit on time per token is looked at ``AHEAD`` tokens on and no further: an answer may end
sooner than ``max_tokens``, and a burst of requests may need what would have been spent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from services.replica.books import Member
from shared.messages import Generate

TOLERANCE = 0.25  # relative rise of time per token that a request without a SLO bears
AHEAD = 8  # tokens


def slack(members: Iterable[Member], now: float, step: float, usual: float | None = None) -> float:
    """Seconds; inf when nothing runs. ``step``: seconds of a step without training; ``usual``:
    seconds per token of slow requests without training, where that is known."""
    bearable = (1 + TOLERANCE) * max(step, usual or 0.0)
    return min((_allowed(member, now, step, bearable) for member in members), default=math.inf)


def _allowed(member: Member, now: float, step: float, bearable: float) -> float:
    """``bearable``: seconds per token for a request that names no limit."""
    request = member.request
    left = max(0, request.sampling.max_tokens - member.delivered)
    allowed = math.inf
    if request.deadline is not None:
        allowed = request.deadline - now - left * step
    if member.first_token is None:
        if request.slo.ttft_ms is not None:
            allowed = min(allowed, request.arrival + request.slo.ttft_ms / 1e3 - now - step)
        return allowed if _limited(request) else min(allowed, bearable - step)
    per_token = None
    if request.slo.tpot_ms is not None:
        per_token = request.slo.tpot_ms / 1e3
    elif not _limited(request):
        per_token = bearable
    if per_token is not None:
        ahead = min(left, AHEAD)
        budget = (member.delivered - len(request.generated) + ahead) * per_token
        allowed = min(allowed, budget - (now - member.first_token) - ahead * step)
    return allowed


def _limited(request: Generate) -> bool:
    return request.deadline is not None or bool(request.slo)
