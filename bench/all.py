"""Every benchmark in one run: ``python -m bench.all`` (``make bench``).

Each runs in a process of its own, one after another, with what it prints going to the terminal;
its last line is its result. A table of all and one JSON line come last. A benchmark that fails
or cannot run here is named with its reason, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

NAMES = (
    "control",
    "dispatch",
    "engine",
    "sharing",
    "federated",
    "overhead",
    "sim",
    "policies",
)
SECONDS = 3600.0  # a benchmark that takes longer is ended


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """The benchmark's JSON, with how long it took; ``error`` instead when it has none."""
    if importlib.util.find_spec(f"bench.{name}") is None:
        return {"bench": name, "error": "not in this installation"}
    started = time.monotonic()
    command = [sys.executable, "-m", f"bench.{name}", *arguments]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"bench": name, "error": f"did not end within {SECONDS:.0f} s"}
    took = round(time.monotonic() - started, 1)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return {"bench": name, "error": f"exit code {done.returncode}", "took_s": took}
    try:
        result = json.loads(lines[-1])
    except json.JSONDecodeError:
        return {"bench": name, "error": "its last line is no JSON", "took_s": took}
    return {"bench": name, **result, "took_s": took}


def table(results: list[dict[str, Any]]) -> Table:
    """Benchmark, figure, value; nested figures by dotted name."""
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
        elif isinstance(item, float):
            rows.append((name, f"{item:.4g}"))
        elif isinstance(item, int | str | bool) or item is None:
            rows.append((name, str(item)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.all", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument(
        "--with",
        dest="extra",
        action="append",
        default=[],
        metavar="NAME=ARGUMENT",
        help="a further argument for one benchmark; may be repeated",
    )
    options = parser.parse_args()
    extra: dict[str, list[str]] = {}
    for entry in options.extra:
        name, _, argument = entry.partition("=")
        if name not in NAMES or not argument:
            parser.error(
                f"--with {entry!r}: NAME=ARGUMENT expected, NAME one of {', '.join(NAMES)}"
            )
        extra.setdefault(name, []).append(argument)
    err = Console(stderr=True)
    results = []
    for name in options.only:
        err.rule(name)
        results.append(run(name, extra.get(name, [])))
    err.print(table(results))
    print(json.dumps({"bench": "all", "results": results}))
    return 1 if any("error" in r for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
