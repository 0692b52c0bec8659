"""Every benchmark in one run: ``python -m bench.all`` (``make bench``).

Each runs in a process of its own, one after another, with what it prints going to the terminal;
its last line is its result. All together take hours, with ``--quick`` about one. One that takes
longer than its limit is ended, with all that it started. After each, ``results.json`` in the
folder of ``--out`` holds what there is. A table of all and one JSON line come last; what failed
or was skipped is named with its reason, and the exit code is 1 if something failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench import azure, child, origin

err = Console(stderr=True)
Result = dict[str, Any]
NAMING = ("cluster", "trace", "policy", "load", "seed")  # of an entry of a list


class Part(NamedTuple):
    """A benchmark, and how many minutes it may take, whole and quick."""

    name: str
    minutes: float
    quick_minutes: float
    quick: tuple[str, ...]  # arguments
    traces: bool = False  # it needs --data FOLDER with the Azure traces
    longer: bool = False  # it does more with --data, where the run is not quick

    @property
    def module(self) -> str:
        return f"bench.{self.name}"


QUICK_FEDERATED = "--rounds 2 --steps 3 --heldout 6 --system-steps 5 --fit-seconds 1 --fit-b 1,4,16"
QUICK_FEDERATED += " --fit-B 0,4 --pairs 2/3 --pair-seconds 40"
QUICK_SIM = "--requests 50000 --sizes 16 1000 --size-requests 10000"
QUICK_POLICIES = "--clusters emulated16 --traces code --loads 4 --scale-at-4x 2.5 --seconds 30"
QUICK_POLICIES += " --policies round_robin dlora collm --no-with-shedding"
PARTS = (
    Part("control", 15, 5, ("--rounds", "1", "--seconds", "5")),
    Part("dispatch", 10, 4, ("--repeats", "1", "--seconds", "1")),
    Part("engine", 90, 10, ("--quick",)),
    Part("sharing", 90, 15, ("--quick",)),
    Part("federated", 120, 15, tuple(QUICK_FEDERATED.split())),
    Part("overhead", 20, 6, ("--seconds", "20", "--probe", "16")),
    Part("sim", 75, 5, tuple(QUICK_SIM.split()), longer=True),
    Part("policies", 240, 8, tuple(QUICK_POLICIES.split()), traces=True),
    Part("pacing", 20, 6, ("--seconds", "30"), traces=True),
)


def run(part: Part, arguments: Sequence[str], minutes: float, folder: Path) -> Result:
    """The benchmark's JSON, with how long it took; ``error`` or ``skipped`` says why not."""
    if importlib.util.find_spec(part.module) is None:
        return {"bench": part.name, "skipped": "not in this installation"}
    started, out = time.monotonic(), folder / f"{part.name}.out"
    try:
        status = child.run(part.module, arguments, 60 * minutes, out)
        found = _last_line(out) if status == 0 else {"error": f"exit code {status}"}
    except child.TooLong:
        found = {"error": f"ended after {minutes:g} min, its limit (--patience makes it longer)"}
    except KeyboardInterrupt:
        found = {"error": "interrupted"}
    return {"bench": part.name, **found, "took_s": round(time.monotonic() - started, 1)}


def _last_line(out: Path) -> Result:
    lines = out.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {"error": f"its last line is no JSON: {out}"}


def table(results: list[Result]) -> Table:
    """Benchmark, figure, value; nested figures by dotted name, entries of a list by theirs."""
    found = Table("benchmark", "figure", "value", title="Benchmarks")
    for result in results:
        for key, value in _flat(result):
            if key != "bench":
                found.add_row(result["bench"], key, value)
    return found


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict):
            rows += _flat(item, f"{name}.")
        elif isinstance(item, list):
            entries = [(k, entry) for k, entry in enumerate(item) if isinstance(entry, dict)]
            for number, entry in entries:
                told = {k: v for k, v in entry.items() if k not in NAMING}
                rows += _flat(told, f"{name}({_name(entry, number)}).")
        elif isinstance(item, float):
            rows.append((name, f"{item:.4g}"))
        elif isinstance(item, int | str | bool) or item is None:
            rows.append((name, str(item)))
    return rows


def _name(entry: dict[str, Any], number: int) -> str:
    """What tells an entry of a list from the others; its number if it names nothing."""
    return ", ".join(str(entry[key]) for key in NAMING if key in entry) or str(number)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    p = argparse.ArgumentParser(prog="python -m bench.all", description=__doc__)
    p.add_argument("--only", nargs="+", choices=names, default=names)
    p.add_argument("--quick", action="store_true", help="a small size of each, about an hour")
    p.add_argument("--data", type=Path, metavar="FOLDER", help=azure.SOURCE)
    p.add_argument("--out", type=Path, default=origin.ROOT / "data" / "bench", metavar="FOLDER")
    p.add_argument("--patience", type=float, default=1.0, help="multiplies all limits")
    p.add_argument(
        "--with",
        dest="extra",
        action="append",
        default=[],
        metavar="NAME=ARGUMENT",
        help="a further argument for one benchmark; may be repeated",
    )
    o = p.parse_args(arguments)
    for entry in o.extra:
        name, _, argument = entry.partition("=")
        if name not in names or not argument:
            p.error(f"--with {entry!r}: NAME=ARGUMENT expected, NAME one of {', '.join(names)}")
    if o.data is not None:
        try:
            azure.traces(o.data)
        except azure.NoTraces as e:
            p.error(str(e))
    return o


def arguments_of(part: Part, o: argparse.Namespace) -> list[str]:
    """Of one benchmark; what --with gives comes last and wins."""
    found = list(part.quick) if o.quick else []
    if part.traces or (part.longer and o.data is not None and not o.quick):
        found += ["--data", str(o.data)]
    return found + [e.partition("=")[2] for e in o.extra if e.partition("=")[0] == part.name]


def every(o: argparse.Namespace, results: list[Result]) -> None:
    """Run what was asked for; ``results`` grows, and the file with it."""
    parts = [part for part in PARTS if part.name in o.only]
    stopped = False
    for number, part in enumerate(parts, start=1):
        minutes = o.patience * (part.quick_minutes if o.quick else part.minutes)
        if stopped:
            result = {"bench": part.name, "skipped": "interrupted before it began"}
        elif part.traces and o.data is None:
            result = {"bench": part.name, "skipped": f"no traces: {azure.ADD}"}
        else:
            err.rule(f"{number} of {len(parts)}: {part.name}, at most {minutes:g} min")
            result = run(part, arguments_of(part, o), minutes, o.out)
            stopped = result.get("error") == "interrupted"
        results.append(result)
        (o.out / "results.json").write_text(json.dumps(summary(o, results), indent=1))


def summary(o: argparse.Namespace, results: list[Result]) -> Result:
    """What the file and the last line say."""
    return {
        "bench": "all",
        **o.origin,
        "quick": o.quick,
        "results": results,
        "failed": {r["bench"]: r["error"] for r in results if "error" in r},
        "skipped": {r["bench"]: r["skipped"] for r in results if "skipped" in r},
    }


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    o = options(arguments)
    o.out.mkdir(parents=True, exist_ok=True)
    o.origin = origin.facts()
    results: list[Result] = []
    # A SIGTERM is like Ctrl-C: the one that runs is ended, the rest are told as skipped.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        every(o, results)
    finally:
        signal.signal(signal.SIGTERM, before)
    err.print(table(results))
    line = summary(o, results)
    print(json.dumps(line))
    return 1 if line["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
