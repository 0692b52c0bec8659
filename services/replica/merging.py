"""When to merge an adapter into the weights, iteration by iteration: dLoRA's rule (OSDI'24).

Source: the authors' artifact (LLMServe/dLoRA-artifact, May 2024; ``vllm/core/scheduler.py``,
credit schedule); the rule is theirs, the code is not. Of each iteration's queue, one entry for
each request that could run, oldest first, F is the first b, n_k how many ask for adapter k:

1. Starvation guard: adapters with much credit come first, the rest of the batch is filled from F,
   the engine runs unmerged. Who was let in stays until half of the credit is used up.
2. Merged with k and n_k >= beta |F|: stay so. Else, with k the adapter of the most requests and
   n_k >= alpha |F|: merge k. Merged, only k's requests run. Else F runs, unmerged.
3. Ledger: credit goes from the adapter that jumped the queue to the one displaced from F: 1 a
   request under the guard, t_u / t_m a request while merged (the jump pays that much more), half of
   it where the batch is not as large as F.
4. Thresholds, from alpha = 1 and beta = t_m / t_u: at the end of each period in one mode the
   requests a second that both modes would have served in it are compared. Merging that paid makes
   alpha smaller by 0.05 (merged sooner), else 1.1 times larger; unmerging that paid makes beta
   larger by 0.05 (left sooner), else 1.1 times smaller.

Adaptations:

- Continuous batching: the queue holds what has begun as well. Each iteration's batch is chosen
  anew; what has begun and is not chosen pauses and keeps its KV memory. What waits for memory is
  not in the queue: it could not run, whatever is decided.
- Credit is counted in displaced requests (the artifact's times B) and as what is above or below the
  artifact's start of (N - 1) units, so that it adds up to 0 also while adapters come and go; N:
  adapters in the queue. The unit, the artifact's 10,000 B, is PATIENCE: one request that only ever
  watches a merged adapter comes first after at most 2 PATIENCE t_m / t_u iterations.
- Only adapters with c_k >= 0 may be merged, there. It always holds here: where the guard lets
  nobody in, the others have less than a unit each above their start, so k is not that much below.
- An adapter without requests leaves the ledger: what it was owed is forgiven, what it owed still
  stands for those who earned it (``gone``). So the ledger is as short as the queue is varied.
- The jumper pays, where the artifact takes whoever has the same place; limits on adapters in memory
  (``capacity``) cut the batch and F before they are compared, not after.
- An adapter that is alone in the queue is merged whatever alpha is: nobody is displaced. (In the
  artifact alpha may pass 1 and then, with a short queue, nothing is ever merged again.)
- t_u is the profile's time of an iteration of that size, not a constant, t_m that over its
  ``merged_speedup``. Iterations under the guard count in no comparison.
- Requests without an adapter are one more adapter (None) in the ledger. To merge it is to unmerge,
  and in the profiles it gains no time: it is never merged, so it displaces nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import repeat
from typing import NamedTuple

from shared.profile import Profile

PATIENCE = 32.0  # displaced requests: one unit of credit
STEP_DOWN = 0.05  # of a threshold that was right, towards the other one
STEP_UP = 1.1  # of a threshold that was wrong

Adapter = Hashable  # None: no adapter


class Choice(NamedTuple):
    """One iteration."""

    batch: tuple[int, ...]  # who runs: places in the queue, ascending
    merged: Adapter  # what is in the weights; None: nothing, adapters are computed beside
    switched: bool  # it was something else in the iteration before: costs a switch
    steady: bool  # until somebody comes or goes, every further choice is this one


class Period:
    """What either mode would have served since the last change of mode. Requests, seconds."""

    def __init__(self) -> None:
        self.iterations = 0
        self.top: Adapter = None  # adapter of the most requests
        self.tops = 0  # changes of it
        self._last = (0, 0, 0.0, 0.0)
        self._sum = (0, 0, 0.0, 0.0)

    def add(self, merged: tuple[int, float], unmerged: tuple[int, float]) -> None:
        """One more iteration: (requests, seconds) of either mode."""
        self._last = (merged[0], unmerged[0], merged[1], unmerged[1])
        self.again(1)

    def again(self, times: int) -> None:
        """The last iteration ``times`` more."""
        a, b, t, u = self._last
        x, y, v, w = self._sum
        self._sum = (x + times * a, y + times * b, v + times * t, w + times * u)
        self.iterations += times

    def gain(self, merged_switches: float, unmerged_switches: float) -> float:
        """Above 0: merged would have served more a second, with these seconds of switches."""
        a, b, t, u = self._sum
        return a * (u + unmerged_switches) - b * (t + merged_switches)


class Merging:
    """See the module. ``decide`` once for each iteration."""

    def __init__(
        self,
        *,
        speedup: float,
        switch: float,
        seconds: Callable[[int], float],
        capacity: int,
        patience: float = PATIENCE,
    ) -> None:
        """``speedup`` t_u / t_m; ``switch`` seconds to merge, unmerge or both; ``seconds(b)`` t_u
        of b requests; ``capacity`` adapters in one unmerged batch."""
        self._speedup, self._switch, self._seconds = speedup, switch, seconds
        self._capacity, self._unit = capacity, patience
        self.alpha, self.beta = 1.0, 1.0 / speedup
        self.merged: Adapter = None
        self.credit: dict[Adapter, float] = {}  # of adapters in the queue; adds up to -gone
        self.gone = 0.0  # what adapters owed when they left
        self._first: list[Adapter] = []  # let in by the guard in the last iteration
        self._period = Period()

    def decide(self, queue: Sequence[Adapter], b: int) -> Choice:
        """Who runs now. ``queue``: the adapter of each request, oldest first; at most ``b`` run."""
        counts = Counter(queue)
        self._settle(counts)
        before, first_before = self.merged, self._first
        fifo = list(range(min(b, len(queue))))
        self._first = self._guarded(counts)
        merged: Adapter = None
        if self._first:
            batch = self._guard_batch(queue, b, fifo)
            payer, price = self._first[0], 1.0
            self._enter(None)
        else:
            top, merged = self._to_merge(counts, len(fifo))
            batch = fifo
            if merged is not None:
                batch = [place for place, a in enumerate(queue) if a == merged][:b]
            payer, price = merged, self._speedup
            self._enter(merged)
            self._count(top if merged is None else merged, counts, len(fifo), b)
        if merged is None:
            batch = self._within(queue, batch)
        moved = self._pay(queue, self._within(queue, fifo), batch, payer, price)
        return Choice(
            tuple(sorted(batch)),
            merged,
            switched=merged != before,
            steady=not moved and merged == before and self._first == first_before,
        )

    def repeated(self, times: int) -> None:
        """The last choice, a steady one, was carried out ``times`` more."""
        if times > 0 and not self._first:
            self._period.again(times)

    # ------------------------------------------------------------ the guard

    def _guarded(self, counts: Counter[Adapter]) -> list[Adapter]:
        """Adapters that come first, the most credit first."""
        stays = set(self._first)
        found = [a for a in counts if self.credit[a] >= self._unit * (0.5 if a in stays else 1.0)]
        return sorted(found, key=lambda a: -self.credit[a])

    def _guard_batch(self, queue: Sequence[Adapter], b: int, fifo: list[int]) -> list[int]:
        """Requests of the adapters that come first, then of F."""
        places: dict[Adapter, list[int]] = {a: [] for a in self._first}
        for place, adapter in enumerate(queue):
            if adapter in places:
                places[adapter].append(place)
        batch = [place for found in places.values() for place in found][:b]
        chosen = set(batch)
        return (batch + [place for place in fifo if place not in chosen])[:b]

    # ------------------------------------------------------------ merging

    def _to_merge(self, counts: Counter[Adapter], fifo: int) -> tuple[Adapter, Adapter]:
        """The adapter of the most requests, and the one to be merged (None: unmerged)."""
        top = max(counts, key=lambda a: counts[a], default=None)
        if self.merged is not None and counts[self.merged] >= max(1.0, self.beta * fifo):
            return top, self.merged
        if top is not None and (len(counts) == 1 or counts[top] >= self.alpha * fifo):
            return top, top
        return top, None

    def _within(self, queue: Sequence[Adapter], batch: list[int]) -> list[int]:
        """The batch with no more adapters than fit into memory; the others wait."""
        inside: set[Adapter] = {None}
        kept = []
        for place in batch:
            if queue[place] in inside or len(inside) <= self._capacity:
                inside.add(queue[place])
                kept.append(place)
        return kept

    # ------------------------------------------------------------ the ledger

    def _settle(self, counts: Counter[Adapter]) -> None:
        """Adapters come with nothing, and leave when they have no request."""
        for adapter in [a for a in self.credit if a not in counts]:
            left = self.credit.pop(adapter)
            if left <= 0:
                self.gone += left
                continue
            debts = self.gone + sum(c for c in self.credit.values() if c < 0)
            share = max(0.0, 1.0 + left / debts) if debts < 0 else 0.0
            self.gone *= share
            self.credit = {a: c * share if c < 0 else c for a, c in self.credit.items()}
        for adapter in counts:
            self.credit.setdefault(adapter, 0.0)

    def _pay(
        self,
        queue: Sequence[Adapter],
        fifo: list[int],
        batch: list[int],
        payer: Adapter,
        price: float,
    ) -> bool:
        """Move credit to those displaced from F; whether any moved."""
        chosen, due = set(batch), set(fifo)
        displaced = [queue[place] for place in fifo if place not in chosen]
        jumped: Sequence[Adapter] = [queue[place] for place in batch if place not in due]
        if len(batch) != len(fifo):
            price, jumped = price / 2, list(repeat(payer, len(displaced)))
        moves = [(a, d) for a, d in zip(jumped, displaced, strict=True) if a != d]
        for jumper, waits in moves:
            self.credit[jumper] -= price
            self.credit[waits] += price
        return bool(moves)

    # ------------------------------------------------------------ the thresholds

    def _count(self, best: Adapter, counts: Counter[Adapter], fifo: int, b: int) -> None:
        """What this iteration would serve with ``best`` merged, and unmerged."""
        period = self._period
        if self.merged is None and (best != period.top or not period.tops):
            period.top, period.tops = best, period.tops + 1
        size = min(counts[best], b)
        speedup = 1.0 if best is None else self._speedup
        period.add((size, self._seconds(size) / speedup), (fifo, self._seconds(fifo)))

    def _enter(self, merged: Adapter) -> None:
        """Run so from now on; a change ends a period, which tunes the threshold that began it."""
        if merged == self.merged:
            return
        period, gap = self._period, self.alpha - STEP_DOWN > self.beta
        if period.iterations:
            if self.merged is not None:
                gain = period.gain(self._switch, 0.0)
                if gain < 0:
                    self.alpha *= STEP_UP
                elif gain > 0 and gap:
                    self.alpha -= STEP_DOWN
            else:
                gain = period.gain(self._switch * period.tops, self._switch)
                if gain > 0:
                    self.beta /= STEP_UP
                elif gain < 0 and gap:
                    self.beta += STEP_DOWN
        self.merged, self._period = merged, Period()


def of(profile: Profile) -> Merging:
    """The rule with a profile's times. Beside nothing that trains: dLoRA does not train."""
    return Merging(
        speedup=profile.merged_speedup,
        switch=profile.merge_seconds,
        seconds=profile.coefficients.t_infer,
        capacity=profile.adapter_slots,
    )
