"""The native library is compiled once, however many replicas start together."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.replica.engines.torch import library


def test_replicas_that_start_together_compile_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "kernels" / "forward.so"
    compiled: list[Path] = []
    all_here = threading.Barrier(4, timeout=30)

    def compile_slowly(_compiler: str, _flags: tuple[str, ...], path: Path) -> None:
        compiled.append(path)
        time.sleep(0.2)  # long enough that the others would begin, were they not held back
        path.write_bytes(b"library")

    def start(_: int) -> object:
        all_here.wait()
        return library._cached(target, "gcc", ())

    monkeypatch.setattr(library, "_compile", compile_slowly)
    monkeypatch.setattr(library, "_open", lambda path: path)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(start, range(4)))
    assert found == [target] * 4
    assert compiled == [target]


def test_a_failed_compilation_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "forward.so"
    monkeypatch.setattr(library, "_open", lambda path: path)
    with pytest.raises(library.NoKernels, match="failed"):
        library._cached(target, "false", ())
    assert not target.exists()
    monkeypatch.setattr(library, "_compile", lambda *args: args[-1].write_bytes(b"library"))
    assert library._cached(target, "gcc", ()) == target
