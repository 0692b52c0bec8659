"""The CUDA stream that a process computes on: serving's goes before training's.

Everything of a process runs on its one stream, so nothing there needs to wait for anything else.
Priorities hold between processes where MPS runs; without it the GPU gives the processes turns.
On a CPU a lane is nothing. Not run on a GPU yet.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch

URGENT, PATIENT = -1, 0  # CUDA: lower goes first
AHEAD = 2  # layers that training may have queued on the GPU


class Lane:
    """Use as ``with lane():`` around whatever computes or allocates on the device."""

    def __init__(self, device: torch.device, *, urgent: bool) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            priority = URGENT if urgent else PATIENT
            self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]

    def __call__(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def take_thread(self) -> None:
        """This thread computes on the lane from now on."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)


class ShortQueue:
    """Keeps the host at most ``AHEAD`` layers before the GPU.

    Kernels are only queued when a layer's Python code returns. Training gives way between layers,
    which means something only if what it has queued is short.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: deque[torch.cuda.Event] = deque()

    def passed(self) -> None:
        """A layer has been queued: wait for the one ``AHEAD`` before it."""
        if not self._on_gpu:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
        if len(self._events) > AHEAD:
            self._events.popleft().synchronize()  # waits without holding Python's lock
