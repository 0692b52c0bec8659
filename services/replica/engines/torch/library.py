"""The library of native kernels: compiled once with the C compiler that is there; its structs.

The structs are those of ``kernels/forward.c``, field by field.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_long, c_void_p
from pathlib import Path
from typing import Any

import torch

from shared.settings import user_cache

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "kernels"
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-pthread", "-shared", "-fPIC")
COMPILE_SECONDS = 600  # seconds of an idle machine are minutes of a busy one


class NoKernels(RuntimeError):
    """The native kernels cannot serve here; the message says why."""


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "qkv o gate_up down norm1 norm2 bias q_norm k_norm keys values"),
        ("window", c_int64),
    )


class LoraStruct(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "a b"),
        ("rank", c_int64),
        *_fields(c_float, "scale unused"),
    )


class ScratchStruct(ctypes.Structure):
    _fields_ = (("memory", c_void_p), ("size", ctypes.c_size_t), ("pool", c_void_p))


class ModelStruct(ctypes.Structure):
    _fields_ = (
        *_fields(c_int64, "hidden inter layers heads kv_heads head_dim vocab threads packed"),
        *_fields(c_float, "eps unused"),
        *_fields(c_void_p, "embed head norm inverse"),
        ("layer", POINTER(LayerStruct)),
        ("scratch", POINTER(ScratchStruct)),
    )


class StepStruct(ctypes.Structure):
    _fields_ = (
        *_fields(c_int64, "rows seqs table_stride logit_rows"),
        *_fields(c_void_p, "tokens starts begins tables adapter logit_row full loras best logits"),
    )


def build(dtype: torch.dtype, extra: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library for ``dtype``, compiled where it is not there yet. Raises NoKernels."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        raise NoKernels("no C compiler (gcc, cc or clang) on the path")
    define = "-DBF16" if dtype == torch.bfloat16 else "-DFP32"
    flags = (*FLAGS, define, *extra)
    digest = hashlib.sha256(" ".join((compiler, *flags, _processor())).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".c", ".h"):
            digest.update(source.read_bytes())
    name = f"forward-{digest.hexdigest()[:16]}.so"
    try:
        return _cached(user_cache() / "kernels" / name, compiler, flags)
    except OSError as e:
        log.info("no kernels in the user's cache (%s); they are compiled for this process", e)
    with tempfile.TemporaryDirectory(prefix="collm-kernels-") as folder:
        return _cached(Path(folder) / name, compiler, flags)  # stays mapped when the file goes


def _cached(path: Path, compiler: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        # Replicas that start together would each compile the same; the first does, the others
        # wait for it (COMPILE_SECONDS at most: the lock falls with the process that holds it).
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                log.info("compiling the kernels for this processor, once; this takes a while")
                _compile(compiler, flags, path)
    return _open(path)


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))}))


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".so", delete=False) as file:
        temporary = Path(file.name)
    try:
        command = [compiler, *flags, str(SOURCES / "forward.c"), "-o", str(temporary), "-lm"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as e:
            raise NoKernels(f"{compiler} took more than {COMPILE_SECONDS} s") from e
        if done.returncode:
            raise NoKernels(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.kernel_name.restype = c_char_p
    library.forward.argtypes = [POINTER(ModelStruct), POINTER(StepStruct)]
    library.forward.restype = c_int
    for function in (library.key_page_elements, library.value_page_elements):
        function.argtypes, function.restype = [POINTER(ModelStruct)], c_long
    library.scratch_free.argtypes = [POINTER(ScratchStruct)]
    if not library.kernel_ready():
        raise NoKernels("the system does not grant the tile registers (AMX)")
    return library
