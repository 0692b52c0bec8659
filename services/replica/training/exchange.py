"""Adapter tensors over torch.distributed: one process group an exchange, gathered on rank 0.

The group is built from its parts (``ProcessGroupGloo`` over a store of our own) and not with
``init_process_group``: a failed one leaves a global counter that never matches again. The
rendezvous lies in a Redis hash: a TCPStore needs a port and does a reverse DNS look-up a
connection. A member that dies breaks the group for all within the timeout; the caller falls
back to blobs. Gloo on CPU and between members that share a GPU (NCCL refuses two ranks on one).
The NCCL branch, for members with a GPU each, is written and has not been run. It counts on
``TORCH_NCCL_BLOCKING_WAIT``, which the replica's parent sets: a timeout raises where it is waited
for, instead of ending the process.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy as np
import orjson
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from redis import Redis
from redis.exceptions import RedisError

from shared import names
from shared.rounds import Group

Arrays = Mapping[str, NDArray[np.float32]]
KEEP_SECONDS = 600  # of the rendezvous keys
_LIMIT = 8 << 30  # bytes of one update that a server is willing to receive


class GroupBroken(RuntimeError):
    """The exchange over the process group failed; the message says at which step and why."""


@dataclass(frozen=True)
class Traffic:
    """What one exchange moved: seconds by the monotonic clock, payload bytes."""

    seconds: float
    bytes: int


class RedisStore(dist.Store):  # type: ignore[misc,name-defined]
    """torch.distributed's key-value store over one Redis hash.

    Setting a key also appends to a stream, so that a waiting rank blocks in Redis instead of
    asking again and again. Raises RuntimeError on a timeout, as torch expects.
    """

    def __init__(self, redis: Redis, group_id: str, timeout: float) -> None:
        super().__init__()
        self._redis, self._seconds = redis, timeout
        self._hash, self._news = names.group(group_id), names.group_news(group_id)

    def set(self, key: str, value: str | bytes) -> None:
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._hash, key, value)
            pipe.xadd(self._news, {"key": key}, maxlen=1000, approximate=True)
            pipe.expire(self._hash, KEEP_SECONDS)
            pipe.expire(self._news, KEEP_SECONDS)
            pipe.execute()

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: Any = self._redis.hget(self._hash, key)
        return bytes(value)

    def add(self, key: str, value: int) -> int:
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hincrby(self._hash, key, value)
            pipe.xadd(self._news, {"key": key}, maxlen=1000, approximate=True)
            pipe.expire(self._hash, KEEP_SECONDS)
            pipe.expire(self._news, KEEP_SECONDS)
            return int(pipe.execute()[0])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        script = (
            "local v = redis.call('HGET', KEYS[1], ARGV[1]) "
            "if (not v and ARGV[2] == '') or v == ARGV[2] then "
            "redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) "
            "redis.call('XADD', KEYS[2], '*', 'key', ARGV[1]) return ARGV[3] end "
            "return v or ARGV[2]"
        )
        reply: Any = self._redis.eval(script, 2, self._hash, self._news, key, expected, desired)
        return bytes(reply)

    def check(self, keys: list[str]) -> bool:
        values: Any = self._redis.hmget(self._hash, keys)
        return all(v is not None for v in values)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        end, last = time.monotonic() + seconds, b"0"
        while not self.check(keys):
            left = end - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"rendezvous: {', '.join(keys)} not set within {seconds:.1f} s")
            block = max(1, min(500, int(left * 1000)))
            news: Any = self._redis.xread({self._news: last}, block=block)
            if news:
                entries = next(iter(news.values()))[0] if isinstance(news, dict) else news[0][1]
                last = entries[-1][0]

    def delete_key(self, key: str) -> bool:
        return bool(self._redis.hdel(self._hash, key))

    def num_keys(self) -> int:
        return int(self._redis.hlen(self._hash))

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()


class Exchange:
    """One gather: every member but rank 0 sends its tensors, rank 0 receives them all.

    A context manager; entering meets the others (GroupBroken after ``group.timeout``), leaving
    ends the group. Used once.
    """

    def __init__(self, redis: Redis, group: Group, device: str = "cpu") -> None:
        self._redis, self._group, self._device = redis, group, device
        self._pg: Any = None
        self._started = 0.0

    def __enter__(self) -> Exchange:
        self._started = time.monotonic()
        group = self._group
        try:
            store = RedisStore(self._redis, group.id, group.timeout)
            prefix = dist.PrefixStore(group.id, store)  # type: ignore[attr-defined]
            limit = timedelta(seconds=group.timeout)
            world = len(group.members)
            if group.backend == "nccl":
                if not dist.is_nccl_available():
                    raise GroupBroken(f"group {group.id}: this build of torch has no NCCL")
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                self._pg = dist.ProcessGroupNCCL(prefix, group.rank, world, options)
            else:
                self._device = "cpu"
                self._pg = dist.ProcessGroupGloo(prefix, group.rank, world, limit)
        except (RuntimeError, RedisError) as e:
            raise GroupBroken(f"group {group.id}: rendezvous failed: {e}") from e
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pg is not None and self._group.backend == "nccl":
            # Its communicator may wait for a member that is gone; a destructor would wait with it.
            (self._pg.abort if error is not None else self._pg.shutdown)()
        self._pg = None  # its destructor closes the connections

    def send(self, tensors: Arrays) -> Traffic:
        """Send named fp32 tensors to rank 0. Raises GroupBroken."""
        layout = [[name, list(tensors[name].shape)] for name in sorted(tensors)]
        meta = torch.frombuffer(bytearray(orjson.dumps(layout)), dtype=torch.uint8)
        flat = torch.from_numpy(
            np.concatenate([np.ravel(tensors[name]) for name in sorted(tensors)])
        )
        head = torch.tensor([meta.numel(), flat.numel(), _checksum(flat)])
        for i, part in enumerate((head, meta, flat)):
            self._wait("sending", lambda p=part, t=i: self._pg.send([self._put(p)], 0, t))
        return self._traffic(flat.numel() * 4)

    def receive(self) -> tuple[dict[str, dict[str, NDArray[np.float32]]], Traffic]:
        """On rank 0: replica id -> its tensors, for all other members. Raises GroupBroken."""
        found, moved = {}, 0
        for rank, member in enumerate(self._group.members):
            if rank == 0:
                continue
            found[member] = self._receive_one(rank)
            moved += sum(t.nbytes for t in found[member].values())
        return found, self._traffic(moved)

    def _receive_one(self, rank: int) -> dict[str, NDArray[np.float32]]:
        member = self._group.members[rank]
        head = self._get(torch.zeros(3, dtype=torch.int64), rank, 0)
        meta_size, size, checksum = (int(x) for x in head)
        if not 0 < meta_size <= 64 << 20 or not 0 < size * 4 <= _LIMIT:
            raise GroupBroken(
                f"group {self._group.id}: {member} announces {meta_size} bytes of names and "
                f"{size} numbers, which is out of bounds"
            )
        meta = self._get(torch.zeros(meta_size, dtype=torch.uint8), rank, 1)
        flat = self._get(torch.zeros(size, dtype=torch.float32), rank, 2)
        if _checksum(flat) != checksum:
            raise GroupBroken(f"group {self._group.id}: tensors of {member} came damaged")
        return _unflatten(orjson.loads(bytes(meta.numpy())), flat.numpy())

    def _get(self, buffer: torch.Tensor, rank: int, tag: int) -> torch.Tensor:
        place = self._put(buffer)
        self._wait("receiving", lambda: self._pg.recv([place], rank, tag))
        return place.cpu()

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def _wait(self, doing: str, start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as e:
            raise GroupBroken(f"group {self._group.id}: {doing} failed: {e}") from e

    def _traffic(self, moved: int) -> Traffic:
        return Traffic(time.monotonic() - self._started, moved)


def _checksum(flat: torch.Tensor) -> int:
    return zlib.crc32(flat.numpy().data)


def _unflatten(
    layout: list[tuple[str, list[int]]], flat: NDArray[np.float32]
) -> dict[str, NDArray[np.float32]]:
    out, position = {}, 0
    for name, shape in layout:
        size = int(np.prod(shape))
        if position + size > flat.size:
            raise GroupBroken(f"tensor {name!r} of shape {shape} exceeds what was sent")
        out[name] = flat[position : position + size].reshape(shape)
        position += size
    return out
