"""``python -m bench.sharing``: one model in memory for serving and fine-tuning, measured.

Parts: memory, start (of training), freshness, isolation, interference, yielding,
learning, speed. Prints a table, draws PNG plots into --out, and prints one JSON line last, which
is kept in --out/sharing.json. Fields of parts that were not run are those of an earlier run of
the same kind in that folder, else null: so a long bench can be run part by part.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.sharing import freshness, interference, learning, material, memory, plots, speed, start
from bench.sharing.rig import rig
from collm import models

PARTS = (
    "memory",
    "start",
    "freshness",
    "isolation",
    "interference",
    "yielding",
    "learning",
    "speed",
)
GRID_B = (1, 2, 4, 8, 16, 32)
GRID_TRAIN = (0, 1, 2, 4, 8)

err = Console(stderr=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.sharing", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma separated")
    parser.add_argument("--quick", action="store_true", help="a few minutes: smaller everything")
    parser.add_argument("--model", default=models.DEFAULT_NAME, help="folder or name in the cache")
    parser.add_argument("--data", type=Path, help="chats to learn; none: made sums in words")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder of plots")
    found = parser.parse_args()
    unknown = set(found.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    return found


class Bench:
    """Runs the parts; ``line`` is what the JSON line will say."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.quick, self.out, self.scratch = options.quick, options.out, scratch
        self.folder = models.resolve(options.model, lambda line: err.print(line)).path
        self.lines = material.lines(options.data)
        self.line: dict[str, Any] = {
            "bench": "sharing",
            "pss_mb": None,
            "extra_of_one_copy": None,
            "start_s": None,
            "publish_to_token_ms": None,
            "torn": None,
            "mixed": None,
            "r2": None,
            "tpot_p99_ratio_yielding": None,
            "train_speed_fraction": None,
            "train_speed_vs_peft": None,
            "ce": None,
            "quick": options.quick,
            "data": "file" if options.data else "made",
            "model": self.folder.name,
        }

    def memory(self) -> None:
        """Both models; the line's own fields are those of the larger one."""
        small = memory.measure(self.folder, self.scratch)
        big = memory.measure(self._billion(), self.scratch)
        self.line["pss_mb"] = {"shared": big["pss_shared_mb"], "separate": big["pss_separate_mb"]}
        self.line["extra_of_one_copy"] = big["extra_of_one_copy"]
        self.line["memory"] = {"default_model": small, "billion": big}

    def _billion(self) -> Path:
        folder = self.scratch / "billion"
        return folder if folder.exists() else material.billion(folder, self.folder)

    def start(self) -> None:
        repeats = 3 if self.quick else 10
        self.line["start_s"] = start.measure(self._billion(), self.scratch, self.lines, repeats)

    def freshness(self) -> None:
        count = 20_000 if self.quick else 100_000
        small = freshness.torn(count // 2, 16_384)
        whole = freshness.torn(count // 2, 921_600)  # the size of the default adapter
        mixed = freshness.mixed(self.folder, 20 if self.quick else 200)
        with rig(self.folder) as r:
            delays = freshness.to_token(r, r.first_version(), 20 if self.quick else 100)
        self.line["publish_to_token_ms"] = delays["median_ms"]
        self.line["torn"] = small["torn"] + whole["torn"]
        self.line["mixed"] = mixed["mixed"]
        self.line["freshness"] = {"torn": [small, whole], "mixed": mixed, "to_token": delays}

    def isolation(self) -> None:
        encoded = material.examples(self.lines, self.folder, self.scratch)
        steps = 50 if self.quick else 500
        self.line["isolation"] = speed.base_after(self.folder, encoded.examples, steps)

    def interference(self) -> None:
        bs = (1, 4, 16, 32) if self.quick else GRID_B
        Bs = (0, 2, 8) if self.quick else GRID_TRAIN
        with rig(self.folder, training={"yielding": "false"}, b_max=32) as r:
            r.add_data(material.alike(self.lines, self.folder))
            cells = interference.grid(r, r.first_version(), bs, Bs, 2.0 if self.quick else 5.0)
        one = interference.fit(cells, "t_infer", ("b",))
        two = interference.fit(cells, "t_infer", ("b", "B"))
        train = interference.fit([c for c in cells if c["B"]], "t_train", ("B", "b"))
        self.line["r2"] = {"one_variable": one["r2"], "two_variables": two["r2"]}
        self.line["interference"] = {
            "cells": cells,
            "t_infer": two["coefficients"],
            "t_train": train["coefficients"],
            "r2_train": train["r2"],
        }
        plots.grid(cells, self.out)

    def yielding(self) -> None:
        with rig(self.folder, b_max=32) as r:
            r.add_data(self.lines)
            found = interference.half_load(
                r,
                r.first_version(),
                B=2,
                seconds=10.0 if self.quick else 40.0,
                repeats=2 if self.quick else 3,
            )
        self.line["tpot_p99_ratio_yielding"] = found["tpot_p99_ratio"]
        self.line["train_speed_fraction"] = found["train_speed_fraction"]
        self.line["yielding"] = found

    def learning(self) -> None:
        parts = material.split(self.lines, self.scratch)
        with rig(self.folder, training={"heldout_limit": 16, "evaluate_every": 2}) as r:
            r.add_data(self.lines)
            found = learning.run(
                r,
                r.first_version(),
                parts.heldout[: 24 if self.quick else 60],
                seconds=100.0 if self.quick else 420.0,
                B=2,
                accumulation=4,
            )
        plots.learning(found, self.out)
        answers = found.pop("per_answer")
        self.line["ce"] = found.pop("ce")
        self.line["learning"] = found | {"quality_above_1": plots.above(answers, 1.0)}

    def speed(self) -> None:
        encoded = material.examples(self.lines, self.folder, self.scratch)
        found = speed.against_peft(self.folder, encoded.examples, 4, 3 if self.quick else 9)
        self.line["train_speed_vs_peft"] = found["ratio"]
        self.line["speed"] = found


KIND = ("quick", "data", "model")  # runs that agree in these may be put together


def kept(line: dict[str, Any], path: Path) -> dict[str, Any]:
    """``line``, its empty fields from the line at ``path`` where that is of the same kind; put
    there in its place."""
    if path.is_file():
        before = json.loads(path.read_text())
        if all(before.get(name) == line[name] for name in KIND):
            line = {**before, **{k: v for k, v in line.items() if v is not None}}
    path.write_text(json.dumps(line, indent=1))
    return line


def show(line: dict[str, Any]) -> None:
    table = Table("what", "value", "wanted", box=None)
    wanted = {
        "extra_of_one_copy": "<= 0.15",
        "publish_to_token_ms": "<= 1 step + 50",
        "torn": "0",
        "mixed": "0",
        "tpot_p99_ratio_yielding": "<= 1.25",
        "train_speed_fraction": ">= 0.4",
        "train_speed_vs_peft": ">= 0.95",
    }
    for key, value in line.items():
        if not isinstance(value, dict | list):
            text = f"{value:.3f}" if isinstance(value, float) else str(value)
            table.add_row(key, text, wanted.get(key, ""))
    err.print(table)


def main() -> int:
    options = arguments()
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="collm-bench-") as scratch:
        bench = Bench(options, Path(scratch))
        for part in PARTS:
            if part in options.parts.split(","):
                err.print(f"{part} …")
                getattr(bench, part)()
    line = kept(bench.line, options.out / "sharing.json")
    show(line)
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
