"""What a training process keeps between jobs: the model, the data, its connections."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch
from redis import Redis
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from services.replica.control_block import ControlBlock
from services.replica.hand_over import receive
from services.replica.lane import Lane
from services.replica.shadow import ShadowWriter
from services.replica.slots import Slots
from services.replica.training import data
from services.replica.training.config import WorkerConfig
from services.replica.training.model import Adapter, LoraSpec, ModelError, build_base
from services.replica.weights import open_fused, resolve_dtype
from shared import adapter_files, chat, data_homes, names, training_data
from shared.factors import to_rank
from shared.messages import BODY, Message, encode
from shared.redis_client import TRANSIENT
from shared.rounds import Lora

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSet:
    """One adapter's private data on this replica, tokenised."""

    train: data.Encoded
    heldout: data.Encoded
    fingerprint: str
    skipped: int = 0


class TrainingContext:
    """Built once a process, before the first job; nothing in it belongs to one job."""

    def __init__(self, config: WorkerConfig, redis: Redis) -> None:
        self.config, self.redis, self.settings = config, redis, config.training()
        started = time.perf_counter()
        self.block = ControlBlock.open(Path(config.control))
        self.slots = Slots(Path(config.slots), config.slot_count)
        self.tokenizer = chat.load(Path(config.folder))
        held = config.weights
        self.device = torch.device("cpu" if held is None else held.device)
        Lane(self.device, urgent=False).take_thread()
        if held is None:
            dtype = resolve_dtype(config.dtype, "cpu")
            weights = open_fused(config.folder, dtype, cache=config.cache or None)
        else:
            weights = receive(held)
        self.base: nn.Module = build_base(Path(config.folder), weights.views)
        self.weights = weights
        self._adapter: Adapter | None = None
        self._untouched: tuple[Lora, int] | None = None  # what it was made as, if nothing more
        self._shadow: ShadowWriter | None = None
        self._data: dict[tuple[str, int, float], DataSet] = {}
        self._offset = 0.0
        self.check: Callable[[], None] = _nothing  # raises when the present job must end
        log.info(
            "model ready in %.2f s, %.0f MB shared",
            time.perf_counter() - started,
            weights.nbytes / 1e6,
        )

    @property
    def threads(self) -> int:
        """Compute threads that a job asks for; 0 = what the host's slots give."""
        return self.settings.threads or (1 if self.device.type == "cuda" else 0)

    # ------------------------------------------------------------ time, metrics

    def synchronise(self) -> None:
        """Measure the offset to Redis time; called at the start of each job."""
        before = time.monotonic()
        seconds, micros = self.redis.time()
        self._offset = seconds + micros / 1e6 - (before + time.monotonic()) / 2

    def now(self) -> float:
        """Redis seconds."""
        return time.monotonic() + self._offset

    def redis_time(self, monotonic: float) -> float:
        return monotonic + self._offset

    def metric(self, kind: str, sample: Message) -> None:
        """Append to the metrics stream; a Redis that is away costs the sample, not the job."""
        fields: dict[str | bytes, str | bytes] = {
            "kind": kind,
            "replica": self.config.replica,
            "model": self.config.model,
            "time": f"{self.now():.6f}",
            BODY: encode(sample),
        }
        try:
            kept = self.config.metrics_kept
            self.redis.xadd(names.METRICS, fields, maxlen=kept, approximate=True)
        except TRANSIENT as e:
            log.warning("a %s sample is lost: Redis is away (%s)", kind, e)

    # ------------------------------------------------------------ adapter

    def adapter(self, lora: Lora, seed: int = 0) -> Adapter:
        """The one LoRA on the base, of the wanted shape; its weights are not reset."""
        spec = LoraSpec(
            r=lora.rank,
            lora_alpha=lora.lora_alpha,
            target_modules=tuple(lora.target_modules),
            lora_dropout=self.settings.lora_dropout,
        )
        self._untouched = None
        if self._adapter is not None and self._adapter.spec == spec:
            return self._adapter
        self.drop_adapter()
        self._adapter = Adapter.attach(self.base, spec, seed)
        return self._adapter

    def fresh_adapter(self, lora: Lora, seed: int) -> Adapter:
        """Like ``adapter``, but as initialised: A random from ``seed``, B zero.

        Not to be changed; one that was made so before and not been asked for by ``adapter``
        since is given again, as attaching takes half a second.
        """
        untouched = self._adapter if self._untouched == (lora, seed) else None
        if untouched is None:
            self.drop_adapter()
            untouched = self.adapter(lora, seed)
            self._untouched = (lora, seed)
        return untouched

    def drop_adapter(self) -> None:
        if self._adapter is not None:
            self.base, self._adapter = self._adapter.detach(), None
        self._untouched = None

    def shadow(self) -> ShadowWriter:
        """The shared memory to the serving side; a larger adapter gets a larger one."""
        if self._shadow is None:
            self._shadow = ShadowWriter(Path(self.config.shadow), capacity=1 << 22)
        return self._shadow

    # ------------------------------------------------------------ data

    def data_set(self, adapter: str, max_tokens: int, heldout: float) -> DataSet | None:
        """The adapter's data, tokenised once; None when there is none here.

        Part ``heldout`` of it is held out, unless its owner named what is.
        Raises training_data.DataError naming file and line.
        """
        home, replica = Path(self.config.data_dir), self.config.replica
        files = data_homes.files(home, replica, adapter)
        if not files:
            return None
        judging = data_homes.files(home, replica, adapter, heldout=True)
        stamp = "|".join(map(_stamp, (files, judging)))
        key = (adapter, max_tokens, heldout)
        cached = self._data.get(key)
        if cached is None or cached.fingerprint != stamp:
            cached = self._encode(files, judging, max_tokens, heldout, stamp)
            self._data[key] = cached
        return cached

    def _encode(
        self, files: list[Path], judging: list[Path], limit: int, heldout: float, stamp: str
    ) -> DataSet:
        chats, skipped = self._chats(files)
        parts = training_data.split(chats, heldout)
        if judging:
            own, broken = self._chats(judging)
            parts, skipped = training_data.Split(tuple(chats), tuple(own)), skipped + broken
        name = ", ".join(f.name for f in files)
        judged = ", ".join(f.name for f in judging) or name
        return DataSet(
            train=data.encode(parts.train, self.tokenizer, limit, name),
            heldout=data.encode(parts.heldout, self.tokenizer, limit, judged),
            fingerprint=stamp,
            skipped=skipped,
        )

    def _chats(self, files: list[Path]) -> tuple[list[training_data.Chat], int]:
        """All chats of these files, and how many lines were skipped."""
        chats: list[training_data.Chat] = []
        skipped = 0
        for file in files:
            loaded = training_data.load(file, skip_broken=self.settings.skip_broken)
            for error in loaded.skipped:
                log.warning("skipped: %s", error)
            chats += loaded.chats
            skipped += len(loaded.skipped)
        return chats, skipped


def _stamp(files: list[Path]) -> str:
    """Changes with any of the files."""
    return ";".join(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files)


def _nothing() -> None:
    """No job runs, so none is stopped."""


def read_tensors(folder: Path, rank: int | None = None) -> dict[str, Tensor]:
    """The tensors of a PEFT folder in fp32. Raises ModelError naming the file.

    ``rank``: what this client trains; an adapter of another rank comes as its best
    approximation with that one (widening is exact).
    """
    path = folder / adapter_files.TENSOR_FILE
    try:
        tensors = {name: t.to(torch.float32) for name, t in load_file(path).items()}
    except (OSError, SafetensorError) as e:
        raise ModelError(f"{path}: cannot be read: {e}") from e
    found = {t.shape[0] for name, t in tensors.items() if ".lora_A." in name}
    if rank is None or found == {rank}:
        return tensors
    fitted = to_rank({name: t.numpy() for name, t in tensors.items()}, rank)
    return {name: torch.from_numpy(t) for name, t in fitted.items()}


# The context of the job that this thread runs; set by the worker around each job.
CONTEXT: ContextVar[TrainingContext] = ContextVar("training context")
