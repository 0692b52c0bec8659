"""What a token would take without training beside, at the load as it is. Pure: no clock.

A turn of the serving loop with b sequences and n prompt tokens takes base + k b + p n, learnt
from turns that no micro-step touched. The part u of each second that goes into k b + p n is what
the load asks for; training does not change it. Without training a turn at this load would take
base / (1 - u). Turns as they are beside training cannot be the measure: training makes them
longer and their batches larger, and its own delay would pass for load.

``limit`` is the time per token that a slow request gets without training (``QUANTILE`` of the
last requests): training may slow every request down to that, and by its tolerance beyond.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.nnls import nnls

QUANTILE = 0.9  # the slow requests; a rare burst is not what others are slowed down to
REQUESTS = 256  # that count
LEAST = 20  # requests before there is a limit
MEMORY = 0.995  # weight of earlier turns in the fit
LEAST_TURNS = 32
SOLVE_EVERY = 8  # turns
BUSIEST = 0.9  # part of the time that the load may ask for; more is a backlog, not a speed
OUTLIER = 3.0  # times the expected duration: the host did something else
SMOOTHING = 0.02  # weight of a turn in the present load

# Units of the columns, so that all are of about one size.
_UNITS = np.array([1.0, 1 / 16, 1 / 64])


@dataclass(frozen=True)
class Mark:
    """How much had been done when a request got its first token."""

    seconds: float
    work: float


class SoloPace:
    """Fed with every turn of a serving loop and with every request's last token."""

    def __init__(self) -> None:
        self._gram = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._turns = 0
        self._line: NDArray[np.float64] = np.zeros(3)  # base, k, p; seconds
        self._seconds = self._work = 0.0  # of all turns; those of k b + p n
        self._share = 0.0  # of the present load
        self._found: deque[float] = deque(maxlen=REQUESTS)
        self._limit: float | None = None

    def turn(self, seconds: float, b: int, prompt_tokens: int, *, alone: bool) -> None:
        """A turn has ended; ``alone``: no training beside it."""
        row = np.array([1.0, b, prompt_tokens]) * _UNITS
        if alone:
            self._learn(row, seconds)
        work = float(row[1:] @ self._line[1:])
        self._seconds += seconds
        self._work += work
        share = min(BUSIEST, work / seconds) if seconds > 0 else 0.0
        self._share += SMOOTHING * (share - self._share)

    def mark(self) -> Mark:
        return Mark(self._seconds, self._work)

    def finished(self, since: Mark) -> None:
        """A request has got its last token. Its first came at ``since``."""
        seconds = self._seconds - since.seconds
        if seconds <= 0 or self._turns < LEAST_TURNS:
            return
        share = min(BUSIEST, (self._work - since.work) / seconds)
        self._found.append(float(self._line[0]) / (1 - share))
        if len(self._found) >= LEAST:
            self._limit = float(np.quantile(self._found, QUANTILE))

    @property
    def step(self) -> float:
        """Seconds a token takes without training at the present load; 0 = not known yet."""
        return float(self._line[0]) / (1 - self._share)

    @property
    def limit(self) -> float | None:
        """Seconds a token that slow requests take without training; None = not known yet."""
        return self._limit

    def _learn(self, row: NDArray[np.float64], seconds: float) -> None:
        if self._turns >= LEAST_TURNS:
            seconds = min(seconds, OUTLIER * float(row @ self._line))
        self._turns += 1
        self._gram = MEMORY * self._gram + np.outer(row, row)
        self._moment = MEMORY * self._moment + seconds * row
        if self._turns < LEAST_TURNS or self._turns % SOLVE_EVERY == 0:
            self._line = _solve(self._gram, self._moment)


def _solve(gram: NDArray[np.float64], moment: NDArray[np.float64]) -> Any:
    """Non-negative least squares from the sums; columns that cannot be told apart share."""
    ridge = 1e-6 * np.trace(gram) * np.eye(3)
    root = np.linalg.cholesky(gram + ridge)
    return nnls(root.T, np.linalg.solve(root, moment))[0]
