"""Prints the project's dependencies, with those of the extras named: one requirement a line."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def wanted(*extras: str) -> list[str]:
    """Requirements of the project and of the extras named."""
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return lines


def main() -> None:
    print("\n".join(wanted(*sys.argv[1:])))


if __name__ == "__main__":
    main()
