"""The shadow adapter: how training hands an adapter version to inference without a stop.

One file, mapped by both processes: a header and two buffers. Publishing number n writes buffer
``n & 1`` and then the counter n, an aligned 8-byte word that is written whole. The reader
reads the counter, copies the buffer, and takes the copy only if the counter is unchanged:
before the writer can touch that buffer again it must have published n + 1. (A seqlock over one
buffer would starve the reader.)

This relies on stores becoming visible in order, as on x86. Elsewhere, and in tests, the reader
also checks the checksum that the writer stored, and an unfit copy is read again at the next
poll.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

_MAGIC = 0x434F4C4C4D534831  # "COLLMSH1"
_PAGE = 4096
_CARD_BYTES = 1 << 20  # description of a version: names, shapes, identity
_TRIES = 8
STRONG_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")

# Words of the header (8 bytes each, on cache lines of their own).
_WORD_MAGIC, _WORD_COUNTER, _WORD_CAPACITY, _WORD_RETIRED = 0, 8, 16, 24
_LENGTHS = struct.Struct("<QQQ")  # bytes of the card, bytes of the data, crc32 of both


class ShadowError(RuntimeError):
    """The file is no shadow of this version, or a version does not fit; says which."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Identity and shape of a published version."""

    name: str
    version: str
    rank: int
    lora_alpha: float
    tensors: dict[str, tuple[int, int, tuple[int, ...]]]  # name -> begin, end (floats), shape


@dataclass(frozen=True)
class Published:
    """A version as the reader took it: fp32 numbers of its own, not the shared memory."""

    name: str
    version: str
    flat: Tensor  # all tensors, one after another
    card: Card

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Views of ``flat`` under PEFT's names."""
        return {n: self.flat[a:b].view(shape) for n, (a, b, shape) in self.card.tensors.items()}


class _Mapped:
    """The file as words and bytes."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
            self.inode = os.fstat(file.fileno()).st_ino
        self.view = memoryview(self.memory)
        self.words = self.view[:_PAGE].cast("Q")
        if len(self.view) < _PAGE or self.words[_WORD_MAGIC] != _MAGIC:
            self.close()
            raise ShadowError(f"{path}: no shadow adapter of this version; restart the replica")
        self.capacity = int(self.words[_WORD_CAPACITY])

    def buffer(self, index: int) -> memoryview:
        size = _PAGE + _CARD_BYTES + self.capacity
        return self.view[_PAGE + index * size : _PAGE + (index + 1) * size]

    def close(self) -> None:
        self.words.release()
        self.view.release()
        self.memory.close()


class ShadowWriter:
    """The training side. One writer a file: the replica's training process."""

    def __init__(self, path: Path, capacity: int) -> None:
        """Open the shadow at ``path``, or make one with room for ``capacity`` bytes a buffer."""
        self.path = path
        self._mapped = _open_or_create(path, capacity)

    @property
    def counter(self) -> int:
        """Number of versions published through this file."""
        return int(self._mapped.words[_WORD_COUNTER])

    def publish(self, card: Card, flat: np.ndarray[Any, np.dtype[np.float32]]) -> int:
        """Make ``flat`` (float32, the tensors one after another) the version to serve.

        Returns the publication's number. A version that is larger than the buffers gets a new
        file in place of the old one. Raises ShadowError for a card that is too long.
        """
        data = np.ascontiguousarray(flat, dtype=np.float32).view(np.uint8).data
        text = msgspec.msgpack.encode(card)
        if len(text) > _CARD_BYTES:
            raise ShadowError(f"{card.name} {card.version}: description of {len(text)} bytes")
        if len(data) > self._mapped.capacity:
            self._replace(len(data))
        number = self.counter + 1
        buffer = self._mapped.buffer(number & 1)
        start = _PAGE + _CARD_BYTES
        buffer[start : start + len(data)] = data
        buffer[_PAGE : _PAGE + len(text)] = text
        checksum = zlib.crc32(data, zlib.crc32(text))
        buffer[: _LENGTHS.size] = _LENGTHS.pack(len(text), len(data), checksum)
        self._mapped.words[_WORD_COUNTER] = number
        return number

    def _replace(self, capacity: int) -> None:
        """A larger file takes the old one's name; the old one tells its readers."""
        old, counter = self._mapped, self.counter
        _create(self.path, capacity, counter)
        self._mapped = _Mapped(self.path)
        old.words[_WORD_RETIRED] = 1
        old.close()

    def close(self) -> None:
        self._mapped.close()


class ShadowReader:
    """The serving side; ``poll`` costs well under a microsecond when nothing is new."""

    def __init__(self, path: Path, *, verify: bool = not STRONG_ORDER) -> None:
        """``verify`` checks every copy's checksum (1 ms for 4 MB). The file need not exist yet."""
        self.path, self._verify = path, verify
        self._mapped: _Mapped | None = None
        self._seen = 0
        self.rejected = 0  # copies thrown away because a newer version came in between

    def poll(self) -> list[Published]:
        """The newest version, if it is newer than the last one taken (else nothing)."""
        if self._mapped is None and not self._open():
            return []
        assert self._mapped is not None
        words = self._mapped.words
        if words[_WORD_COUNTER] == self._seen and not words[_WORD_RETIRED]:
            return []
        if words[_WORD_RETIRED]:
            self._mapped.close()
            self._mapped = None
            return self.poll() if self._open() else []
        for _ in range(_TRIES):
            number = int(words[_WORD_COUNTER])
            taken = self._copy(number)
            if taken is not None:
                self._seen = number
                return [taken]
            self.rejected += 1
        return []  # the writer is faster than we copy: the next poll tries again

    def skip(self) -> None:
        """Take what is there as known: a restarted reader loads current versions from disk."""
        if self._mapped is not None or self._open():
            assert self._mapped is not None
            self._seen = int(self._mapped.words[_WORD_COUNTER])

    def _open(self) -> bool:
        if not self.path.exists():
            return False
        self._mapped = _Mapped(self.path)
        return True

    def _copy(self, number: int) -> Published | None:
        """Publication ``number`` copied out of shared memory; None if it was overtaken."""
        assert self._mapped is not None
        buffer = self._mapped.buffer(number & 1)
        card_bytes, data_bytes, checksum = _LENGTHS.unpack(bytes(buffer[: _LENGTHS.size]))
        if card_bytes > _CARD_BYTES or data_bytes > self._mapped.capacity:
            return None
        text = bytes(buffer[_PAGE : _PAGE + card_bytes])
        start = _PAGE + _CARD_BYTES
        data = bytearray(buffer[start : start + data_bytes])
        if int(self._mapped.words[_WORD_COUNTER]) != number:
            return None
        if self._verify and zlib.crc32(data, zlib.crc32(text)) != checksum:
            return None
        card = msgspec.msgpack.decode(text, type=Card)
        flat = torch.frombuffer(data, dtype=torch.float32)
        return Published(card.name, card.version, flat, card)

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


def _open_or_create(path: Path, capacity: int) -> _Mapped:
    if path.exists():
        mapped = _Mapped(path)
        if mapped.capacity >= capacity:
            return mapped
        counter = int(mapped.words[_WORD_COUNTER])
        _create(path, capacity, counter)
        mapped.words[_WORD_RETIRED] = 1
        mapped.close()
    else:
        _create(path, capacity, 0)
    return _Mapped(path)


def _create(path: Path, capacity: int, counter: int) -> None:
    """A whole new file at ``path``, in place of any other; pages are made when written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    capacity = -(-capacity // _PAGE) * _PAGE
    temporary = path.with_suffix(f".{os.getpid()}")
    with temporary.open("wb") as file:
        file.truncate(_PAGE + 2 * (_PAGE + _CARD_BYTES + capacity))
        header = [0] * (_PAGE // 8)
        header[_WORD_MAGIC] = _MAGIC
        header[_WORD_COUNTER] = counter
        header[_WORD_CAPACITY] = capacity
        file.write(struct.pack(f"<{len(header)}Q", *header))
    os.replace(temporary, path)
