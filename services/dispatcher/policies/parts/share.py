"""Fairness between tenants: virtual token counters (Sheng et al., OSDI'24, "Fairness in Serving").

A tenant's counter grows with the tokens served to it: those expected at a release, corrected at
the answer's end. Of the tenants that wait the one with the smallest counter goes next. A tenant
that was away starts no lower than the least of those here, so idleness is not saved up.
"""

from __future__ import annotations

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0  # a generated token costs more than one that is prefilled


class TokenShares:
    """Counters of the tenants that have requests waiting or running."""

    def __init__(self) -> None:
        self._counter: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._era = 1  # counters are forgotten at its end

    def enter(self, tenant: str) -> None:
        """A request of the tenant waits."""
        waiting = self._waiting.get(tenant, 0)
        if waiting == 0 and self._waiting:
            least = min(self._counter.get(t, 0.0) for t in self._waiting)
            self._counter[tenant] = max(self._counter.get(tenant, 0.0), least)
        self._waiting[tenant] = waiting + 1

    def leave(self, tenant: str) -> None:
        """It no longer waits (released, cancelled or refused)."""
        waiting = self._waiting.get(tenant, 0) - 1
        if waiting > 0:
            self._waiting[tenant] = waiting
        else:
            self._waiting.pop(tenant, None)
            if not self._waiting:
                self._counter.clear()
                self._era += 1

    def charge(self, tenant: str, prompt: float, output: float) -> int:
        """Tokens will be served to the tenant. Returns what ``settle`` wants; 0: nothing."""
        if tenant not in self._counter and len(self._waiting) <= 1:
            return 0
        self._add(tenant, PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * output)
        return self._era

    def settle(self, tenant: str, charged: int, prompt: float, output: float) -> None:
        """The answer has ended: tokens served beyond those charged, below 0 if they were fewer."""
        if charged == self._era:
            self._add(tenant, PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * output)

    def _add(self, tenant: str, tokens: float) -> None:
        self._counter[tenant] = self._counter.get(tenant, 0.0) + tokens

    @property
    def several(self) -> bool:
        """Whether more than one tenant waits."""
        return len(self._waiting) > 1

    def counter(self, tenant: str) -> float:
        return self._counter.get(tenant, 0.0)
