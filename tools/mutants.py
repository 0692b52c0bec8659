"""Prints what became of the mutants, module by module: ``python -m tools.mutants``.

Reads what ``make mutation`` left in ``mutants/``. A mutant counts as found when a test failed, ran
too long or could not be loaded with it; one that no test reaches counts as not found.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

FOLDER = Path("mutants")
# Exit codes of the test run of a mutant, as mutmut keeps them.
SURVIVED, UNREACHED = {0}, {5, 33}
UNTESTED = {None, 2, 34}


def verdict(code: int | None) -> str:
    if code in UNTESTED:
        return "untested"
    return "survived" if code in SURVIVED | UNREACHED else "found"


def counts(meta: Path) -> Counter[str]:
    """Verdicts of the mutants of one file."""
    return Counter(map(verdict, json.loads(meta.read_text())["exit_code_by_key"].values()))


def line(name: str, found: Counter[str]) -> str:
    tested = found["found"] + found["survived"]
    share = f"{found['found'] / tested:7.1%}" if tested else "      -"
    left = f"  ({found['untested']} not tested yet)" if found["untested"] else ""
    return f"{share} of {tested:5}  {name}{left}"


def main() -> int:
    total: Counter[str] = Counter()
    for meta in sorted(FOLDER.rglob("*.py.meta")):
        found = counts(meta)
        if found:
            print(line(str(meta.relative_to(FOLDER)).removesuffix(".meta"), found))
            total += found
    if not total:
        print(f"no mutants in {FOLDER}/; run: make mutation", file=sys.stderr)
        return 1
    print(line("all", total))
    return 0


if __name__ == "__main__":
    sys.exit(main())
