"""Prints the project's dependencies, with those of the extras named: one requirement a line."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    for line in project["dependencies"]:
        print(line)
    for extra in sys.argv[1:]:
        for line in project["optional-dependencies"][extra]:
            print(line)


if __name__ == "__main__":
    main()
