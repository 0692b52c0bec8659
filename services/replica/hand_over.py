"""Base weights that one process holds and others use: no file, no copy, no pickle.

On a GPU the content of the fused file lies in the holder's device memory once. Others open it
through CUDA's inter-process handle, which travels over the replica's own pipes as JSON. The handle
is torch's (``UntypedStorage._share_cuda_``): memory, offset, a counter of users, an event. Each
user needs a handle of its own, because the counter in it counts one user.

On a CPU the same is done with a sealed memory file (memfd): nobody can write to it any more, the
holder included, and users map it privately. Serving does not need this, it maps the fused file;
it is for model folders on slow or unreliable disks, and it runs the code that a GPU needs.

The CUDA branch is written after torch's documentation and has not been run on a GPU yet.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from services.replica.checkpoint import WeightsError
from services.replica.weights import DTYPES, FusedWeights, cut


class CudaHandle(msgspec.Struct, frozen=True, kw_only=True, tag="cuda"):
    """Device memory of another process. Sizes and offsets in bytes."""

    file: str  # the fused file: its header says where each tensor lies
    dtype: str
    index: int  # CUDA device; holder and user see the same ones
    memory: bytes
    size: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_wait: bool

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"

    def open(self) -> Tensor:
        """The content of the fused file [elements], in the holder's memory.

        Raises WeightsError when the holder is gone or the device cannot be opened.
        """
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            storage = torch.UntypedStorage._new_shared_cuda(
                self.index,
                self.memory,
                self.size,
                self.offset,
                self.counter,
                self.counter_offset,
                self.event,
                self.event_wait,
            )
        except RuntimeError as e:
            raise WeightsError(
                f"{self.device}: the weights' memory cannot be opened ({e}); holder and user must "
                "see the same devices, and containers must share their IPC namespace"
            ) from e
        return tensor_over(storage, DTYPES[self.dtype])


class MemoryHandle(msgspec.Struct, frozen=True, kw_only=True, tag="memory"):
    """A memory file of another process, found through its open descriptor."""

    file: str
    dtype: str
    pid: int
    descriptor: int
    inode: int
    size: int  # bytes

    @property
    def device(self) -> str:
        return "cpu"

    def open(self) -> Tensor:
        """The content of the fused file [elements], mapped privately. Raises WeightsError."""
        path = f"/proc/{self.pid}/fd/{self.descriptor}"
        dtype = DTYPES[self.dtype]
        try:
            if os.stat(path).st_ino != self.inode:
                raise WeightsError(f"{path}: not the weights any more; their holder has changed")
            return torch.from_file(
                path, shared=False, size=self.size // dtype.itemsize, dtype=dtype
            )
        except (OSError, RuntimeError) as e:
            raise WeightsError(f"{path}: the weights cannot be mapped ({e})") from e


Handle = CudaHandle | MemoryHandle


class Store(Protocol):
    """Weights in the memory of this process."""

    device: str

    def share(self) -> Handle:
        """A handle for one more user."""
        ...


class CudaStore:
    """The weights on a GPU, in one piece."""

    def __init__(self, weights: FusedWeights, device: torch.device) -> None:
        self.device = str(device)
        self._path, self._whole = weights.path, weights.to(device).whole
        torch.cuda.synchronize(device)  # whoever opens a handle finds everything there

    def share(self) -> CudaHandle:
        found = self._whole.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        index, memory, size, offset, counter, counter_offset, event, wait = found
        return CudaHandle(
            file=str(self._path),
            dtype=_name(self._whole.dtype),
            index=index,
            memory=memory,
            size=size,
            offset=offset,
            counter=counter,
            counter_offset=counter_offset,
            event=event,
            event_wait=wait,
        )


class MemoryStore:
    """The weights in a sealed memory file."""

    device = "cpu"

    def __init__(self, weights: FusedWeights) -> None:
        self._path, self._dtype = weights.path, weights.whole.dtype
        content = weights.whole.view(torch.uint8).numpy()
        self._size = content.nbytes
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._descriptor = os.memfd_create("collm-weights", flags)
        with open(self._descriptor, "wb", closefd=False) as out:
            out.write(content.data)
        fcntl.fcntl(
            self._descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        )

    def share(self) -> MemoryHandle:
        return MemoryHandle(
            file=str(self._path),
            dtype=_name(self._dtype),
            pid=os.getpid(),
            descriptor=self._descriptor,
            inode=os.fstat(self._descriptor).st_ino,
            size=self._size,
        )

    def close(self) -> None:
        """Let the memory go once its users have ended."""
        os.close(self._descriptor)


def hold(weights: FusedWeights, device: torch.device) -> Store:
    """Take ``weights`` into the memory of ``device``."""
    return CudaStore(weights, device) if device.type == "cuda" else MemoryStore(weights)


def receive(handle: Handle) -> FusedWeights:
    """The weights behind ``handle``, nothing copied. Raises WeightsError."""
    return cut(Path(handle.file), handle.open())


def tensor_over(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """All of ``storage`` as one flat tensor, nothing copied."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).view(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
