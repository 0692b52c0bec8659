"""Results of simulations kept as JSON, so that a long evaluation can be cut and taken up again.

A result's file is named by a digest of its scenario and of the code that decides its outcome:
after a change of either it is simulated anew.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sim.scenario import CURVES, Scenario, run

ROOT = Path(__file__).resolve().parent.parent.parent
CODE = (
    "sim/**/*.py",
    "services/dispatcher/policies/**/*.py",
    "services/dispatcher/demand_meter.py",
    "services/coordinator/search.py",
    "services/coordinator/goodput.py",
    "services/dispatcher/credit.py",
    "services/launcher/*.py",
    "loadgen/arrivals.py",
    "loadgen/trace.py",
    "shared/latency.py",
    "config/profiles/*.yaml",
)

Result = dict[str, Any]


class OutOfTime(Exception):
    """The time given is used up; what is done is kept."""


class Store:
    """``minutes``: no simulation is begun after so long (None: no limit)."""

    def __init__(self, folder: Path, minutes: float | None, say: Callable[[str], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.say = folder, say
        self._until = None if minutes is None else time.monotonic() + 60 * minutes
        self._code = _digest_of_code()

    def run(self, scenario: Scenario) -> Result:
        """The scenario's result, simulated unless it is known. Raises OutOfTime."""
        return self.known(scenario.saved(), lambda: run(scenario))

    def known(self, what: Any, find: Callable[[], Result]) -> Result:
        """The result of ``find``, which ``what`` (plain JSON) describes. Raises OutOfTime."""
        text = json.dumps([self._code, what], sort_keys=True, default=str)
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
        if path.is_file():
            kept: Result = json.loads(path.read_text(encoding="utf-8"))
            return kept
        if self._until is not None and time.monotonic() > self._until:
            raise OutOfTime
        plain = msgspec.json.encode(find(), enc_hook=str)
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes(plain)
        unfinished.replace(path)
        fresh: Result = json.loads(plain)  # as it will be read the next time
        return fresh


def _digest_of_code() -> str:
    digest = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    for path in sorted(CURVES.glob("*.yaml")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
