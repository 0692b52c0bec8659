"""Where the time of one piece of work went: seconds by the name of a stage."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Stopwatch:
    """Stages follow one another; one that comes again adds to what it has."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Book the block's time under ``name``, also when it raises."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - begun)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def in_words(seconds: Mapping[str, float]) -> str:
    """``prepare=0.412 evaluate=1.930``: as events carry it."""
    return " ".join(f"{name}={value:.3f}" for name, value in seconds.items())


def from_words(text: str) -> dict[str, float]:
    """What ``in_words`` wrote. Raises ValueError."""
    pairs = (part.partition("=") for part in text.split())
    return {name: float(value) for name, _, value in pairs}
