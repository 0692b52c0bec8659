"""What the launcher knows of the past: loads, arrivals, throughput, how long states have lasted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from services.launcher import idle
from services.launcher.terms import COMBINED, IDLE, SERVING, Options, Seen
from services.launcher.windows import Load, LoadWindow, length, volatility

ARRIVAL_TICKS = 60  # ticks over which lambda-hat and the volatility are taken
RATE_FLOOR = 1 / 60  # requests per second; lambda-hat is never taken lower
LEAST_UTILISATION = 0.05  # for estimating a capacity from what a replica did


class Books:
    """One cluster's. ``note`` is called once a tick, before anything is asked."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._windows: dict[str, LoadWindow] = {}
        self._states: dict[str, str] = {}
        self._idle_ticks: dict[str, int] = {}
        self._suspended_ticks: dict[str, int] = {}
        self._arrivals: dict[str, deque[float]] = {}
        self._throughput: dict[str, deque[float]] = {}

    def note(self, replicas: Sequence[Seen], arrivals: Mapping[str, float]) -> None:
        """What was seen in this tick; replicas that are gone are forgotten."""
        for base, count in arrivals.items():
            self._arrivals.setdefault(base, deque(maxlen=ARRIVAL_TICKS)).append(count)
        gone = self._states.keys() - {r.id for r in replicas}
        for name in gone:
            for book in (
                self._states,
                self._windows,
                self._idle_ticks,
                self._throughput,
                self._suspended_ticks,
            ):
                book.pop(name, None)
        for seen in replicas:
            self._note_one(seen)

    def _note_one(self, seen: Seen) -> None:
        o = self._options
        window = self._windows.setdefault(seen.id, LoadWindow(o.t_max, o.decay))
        if self._states.get(seen.id) != seen.state:
            window.clear()
            self._idle_ticks[seen.id] = self._suspended_ticks[seen.id] = 0
            self._states[seen.id] = seen.state
        if seen.state == SERVING and seen.load is not None:
            window.add(seen.load)
        self._idle_ticks[seen.id] += seen.state == IDLE
        suspended = seen.state == COMBINED and seen.suspended
        self._suspended_ticks[seen.id] = self._suspended_ticks[seen.id] + 1 if suspended else 0
        done = self._throughput.setdefault(seen.id, deque(maxlen=o.t0))
        done.append(seen.finished)

    # ------------------------------------------------------------ arrivals

    def rate(self, base: str) -> float:
        """lambda-hat: arrivals per second, EWMA over the last minute, at least the floor."""
        arrivals = self._arrivals.get(base)
        if not arrivals:
            return RATE_FLOOR
        ages = range(len(arrivals) - 1, -1, -1)
        weights = [math.exp(-self._options.decay * age) for age in ages]
        mean = sum(w * a for w, a in zip(weights, arrivals, strict=True)) / sum(weights)
        return max(RATE_FLOOR, mean / self._options.tick)

    def lengths(self, base: str) -> tuple[int, int]:
        """(T, T') in ticks at the present volatility of arrivals."""
        o, cv = self._options, volatility(self._arrivals.get(base, ()))
        return length(o.t0, cv, o.t_min, o.t_max), length(o.t_back0, cv, o.t_min, o.t_max)

    # ------------------------------------------------------------ one replica

    def load(self, replica: str, ticks: int) -> Load | None:
        """Mean over its last ``ticks``; None unless it has served for so long."""
        window = self._windows[replica]
        return window.mean(ticks) if len(window) >= ticks else None

    def idle_ticks(self, replica: str) -> int:
        """How long it has been Idle."""
        return self._idle_ticks[replica]

    def suspended_ticks(self, replica: str) -> int:
        """How long load has kept its training at B = 0; 0 for one that is not seen."""
        return self._suspended_ticks.get(replica, 0)

    def begin_idle(self, replicas: Iterable[str]) -> None:
        """Count the ticks that these have been Idle from now on."""
        self._idle_ticks.update(dict.fromkeys(replicas, 0))

    # ------------------------------------------------------------ capacity, requests per second

    def capacities(self, dispatchable: Sequence[Seen]) -> list[idle.Capacity]:
        """One a replica; a replica of which nothing is known counts like the others' mean."""
        rates = {r.id: self._capacity(r) for r in dispatchable}
        known = [rate for rate in rates.values() if not math.isinf(rate)]
        usual = sum(known) / len(known) if known else math.inf
        return [
            idle.Capacity(id=name, rate=usual if math.isinf(rate) else rate)
            for name, rate in rates.items()
        ]

    def _capacity(self, seen: Seen) -> float:
        """Requests per second: by its latency model, else by what it did at its utilisation."""
        if seen.rate is not None:
            return seen.rate
        done, window = self._throughput.get(seen.id), self._windows[seen.id]
        load = window.mean(len(window)) if len(window) else None
        if load is None or load.utilisation < self._options.floors.utilisation:
            return math.inf  # hardly anything is asked of it: nothing is known against it
        if not done:
            return 0.0
        per_second = sum(done) / len(done) / self._options.tick
        return per_second / max(load.utilisation, LEAST_UTILISATION)

    def training_rate(self, seen: Seen) -> float:
        """While it trains: by its latency model, else half of what it serves alone."""
        return self._capacity(seen) / 2 if seen.rate_training is None else seen.rate_training
