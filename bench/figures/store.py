"""Results of simulations kept as JSON, so that a long evaluation can be cut and taken up again.

A result's file is named by a digest of its scenario, of the files that this names (traces, a
profile, a policy of one's own) and of the code that decides its outcome: after a change of any
it is simulated anew. ``measured`` in a result says when and on what machine it was made: CPU
times in it are that machine's, whenever they are shown.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from bench import origin
from bench.progress import Progress
from services.dispatcher.policies.registry import create
from sim.scenario import Scenario, run

ROOT = Path(__file__).resolve().parent.parent.parent
# Wide on purpose: what only draws or words results (the rest of bench/figures) is left out.
CODE = (
    "sim/**/*.py",
    "services/dispatcher/policies/**/*.py",
    "services/dispatcher/credit.py",
    "services/dispatcher/demand_meter.py",
    "services/coordinator/*.py",
    "services/launcher/*.py",
    "services/replica/merging.py",
    "services/replica/pace.py",
    "loadgen/arrivals.py",
    "loadgen/trace.py",
    "shared/*.py",
    "bench/sim.py",
    "bench/figures/method.py",
    "bench/figures/runs.py",
    "config/profiles/*.yaml",
    "config/curves/*.yaml",
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
        self._code = digest_of_code()
        self._expected: dict[Path, float] = {}  # size of what is to be simulated
        self._progress = Progress([])

    def expect(self, scenarios: Iterable[Scenario]) -> None:
        """What will be asked for, so that it can be told how far it is."""
        sizes = {self._path(_described(s)): _size(s) for s in scenarios}
        self._progress = Progress([*sizes.values()])
        self._expected = {path: size for path, size in sizes.items() if not path.is_file()}
        for path in sizes.keys() - self._expected.keys():
            self._progress.skipped(sizes[path])
        self.say(f"simulations: {self._progress}")

    def missing(self, scenarios: Iterable[Scenario]) -> list[Scenario]:
        """Those that are not known yet, each once, the longest first."""
        found = {self._path(_described(s)): s for s in scenarios}
        new = [s for path, s in found.items() if not path.is_file()]
        return sorted(new, key=_size, reverse=True)

    @property
    def late(self) -> bool:
        """The time given is used up."""
        return self._until is not None and time.monotonic() > self._until

    def in_time(self) -> None:
        """Raises OutOfTime when nothing more may be begun."""
        if self.late:
            raise OutOfTime

    def run(self, scenario: Scenario) -> Result:
        """The scenario's result, simulated unless it is known. Raises OutOfTime."""
        return self.known(_described(scenario), lambda: run(scenario))

    def known(self, what: Any, find: Callable[[], Result]) -> Result:
        """The result of ``find``, which ``what`` (plain JSON) describes. Raises OutOfTime."""
        path = self._path(what)
        if not path.is_file():
            self.in_time()
            began = time.monotonic()
            result = find()
            self._keep(path, result, time.monotonic() - began)
        kept: Result = json.loads(path.read_text(encoding="utf-8"))
        return kept

    def keep(self, scenario: Scenario, result: Result, seconds: float) -> None:
        """A result that was found elsewhere; ``seconds``: what it took of the time there is."""
        self._keep(self._path(_described(scenario)), result, seconds)

    def _keep(self, path: Path, result: Result, seconds: float) -> None:
        measured = {"date": origin.date(), "machine": origin.machine()}
        plain = msgspec.json.encode({**result, "measured": measured}, enc_hook=str)
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes(plain)
        unfinished.replace(path)
        size = self._expected.pop(path, None)
        if size is not None:
            self._progress.took(seconds, size)
            self.say(f"simulations: {self._progress}")

    def _path(self, what: Any) -> Path:
        text = json.dumps([self._code, what], sort_keys=True, default=str)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _size(scenario: Scenario) -> float:
    """What it costs in comparison: about its number of requests."""
    work = scenario.workload
    return work.rate_scale * (work.duration or 3600.0)


def _described(scenario: Scenario) -> Any:
    """The scenario, and what is in the files that it names."""
    files = [path for _, path in scenario.workload.traces]
    files += [Path(n) for n in (scenario.profile, scenario.curve) if n.endswith((".yaml", ".yml"))]
    if ":" in scenario.policy:  # its own file; what that imports is not looked at
        policy = create(scenario.policy, **scenario.policy_options)
        files.append(Path(inspect.getfile(type(policy))))
    return [scenario.saved(), [_digest(f, f.stat().st_mtime_ns) for f in files if f.is_file()]]


@functools.lru_cache(maxsize=64)
def _digest(path: Path, _: int) -> str:
    """Of a file's contents, read again when it was written again."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def digest_of_code(root: Path = ROOT) -> str:
    """Of everything that decides what a simulation finds, by file and contents."""
    digest = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(root.glob(pattern)):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
