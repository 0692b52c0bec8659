"""A wall clock that can be stepped for all services at once (a small preloaded library)."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class NoCompiler(RuntimeError):
    """The library cannot be built here."""


class SteppedClock:
    """``variables`` go into the services' environment; ``step`` acts at once on all of them."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise NoCompiler("no C compiler: the wall clock cannot be stepped")
        library, self._file = folder / "clock.so", folder / "clock.step"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        self._file.write_bytes(struct.pack("q", 0))
        self.variables = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._file)}

    def step(self, seconds: int) -> None:
        """All wall clocks differ from the true time by this much from now on."""
        with self._file.open("r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
            memory[:8] = struct.pack("q", seconds)
