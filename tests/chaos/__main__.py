"""``python -m tests.chaos``: run a campaign, print one JSON line last, exit 1 on a violation."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.chaos.campaign import Campaign, Plan


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=6, help="clients")
    parser.add_argument("--no-train", action="store_true")
    parser.add_argument("--kinds", help="only these faults, separated by commas")
    parser.add_argument("--folder", type=Path, help="keep everything here (default: thrown away)")
    options = parser.parse_args()
    plan = Plan(
        seconds=options.minutes * 60,
        every=options.every,
        seed=options.seed,
        workers=options.workers,
        train=not options.no_train,
    )
    if options.kinds:
        plan = Plan(**{**_fields(plan), "kinds": tuple(options.kinds.split(","))})
    with tempfile.TemporaryDirectory() as scratch:
        if options.folder:
            options.folder.mkdir(parents=True, exist_ok=True)
        report = Campaign(options.folder or Path(scratch), plan).run()
    for violation in report["violations"]:
        print(violation, file=sys.stderr)
    print(json.dumps(report))
    return 0 if report["chaos"] == "ok" else 1


def _fields(plan: Plan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in plan.__struct_fields__}


if __name__ == "__main__":
    sys.exit(main())
