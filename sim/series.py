"""Values over time in constant memory: buckets that double their width when time outgrows them."""

from __future__ import annotations

from collections.abc import Sequence

LENGTH = 1024


class Series:
    """Rows of sums over time. ``width`` is the seconds of a bucket."""

    def __init__(self, rows: Sequence[str], width: float = 1.0) -> None:
        self.width = width
        self.rows = {name: [0.0] * LENGTH for name in rows}
        self._used = 0

    def add(self, row: str, time: float, value: float) -> None:
        """Add ``value`` to the bucket of ``time``."""
        k = int(time / self.width)
        while k >= LENGTH:
            self._double()
            k = int(time / self.width)
        self.rows[row][k] += value
        if k >= self._used:
            self._used = k + 1

    def spread(self, row: str, start: float, end: float) -> None:
        """Add the seconds from ``start`` to ``end``, each to its bucket."""
        if end <= start:
            return
        self.add(row, end, 0.0)
        values, width = self.rows[row], self.width
        first, last = int(start / width), int(end / width)
        if first == last:
            values[first] += end - start
            return
        values[first] += (first + 1) * width - start
        for k in range(first + 1, last):
            values[k] += width
        values[last] += end - last * width

    def _double(self) -> None:
        for name, values in self.rows.items():
            halved = [values[k] + values[k + 1] for k in range(0, LENGTH, 2)]
            self.rows[name] = halved + [0.0] * (LENGTH // 2)
        self.width *= 2
        self._used = (self._used + 1) // 2

    def values(self, row: str) -> list[float]:
        """The buckets in use."""
        return self.rows[row][: self._used]
