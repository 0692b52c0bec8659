"""The process that holds the weights as the parent sees it: started where one is needed.

On a CPU every process maps the fused file and there is none, unless the settings ask for it. On a
GPU it owns the memory: when it dies, its users work on memory that is no more, and start again.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from services.replica.children import Child, GaveUp
from services.replica.settings import ReplicaSettings

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0


class WeightsChild:
    """Keeps the holder alive; ``share`` gives a handle for one user."""

    def __init__(self, settings: ReplicaSettings, lost: Callable[[], None]) -> None:
        """``lost`` is called when the holder has died: its users must start again."""
        self._settings, self._lost = settings, lost
        self._child = Child(
            "weights",
            run,
            settings.model_dump_json(),
            heard=self._heard,
            restarts=settings.restarts,
        )
        self._settled = asyncio.Event()  # held, mapped, or failed for good
        self._mapped = not needed(settings)
        self._fatal: str | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any] | None]] = {}
        if self._mapped:
            self._settled.set()

    async def keep(self) -> None:
        """Run the holder until cancelled; returns at once where none is needed. Raises GaveUp."""
        while not self._mapped:
            self._child.start()
            watch = asyncio.create_task(self._limit_load())
            try:
                how = await self._child.ended()
            finally:
                watch.cancel()
            await self._has_ended(how)

    async def _has_ended(self, how: str) -> None:
        """Tell the users; return when it may be started again."""
        if self._mapped:
            return  # it had nothing to hold
        self._settled.clear()
        self._answer_none()
        self._lost()
        try:
            if self._fatal is not None:
                raise GaveUp(self._fatal)
            log.error("weights process %s; what used its memory starts again", how)
            await self._child.pause_before_restart(how)
        except GaveUp as e:
            self._fatal = str(e)
            self._settled.set()
            raise

    async def share(self) -> dict[str, Any] | None:
        """A handle for one user as JSON values; None: it maps the file. Raises GaveUp."""
        while True:
            await self._settled.wait()
            if self._fatal is not None:
                raise GaveUp(self._fatal)
            if self._mapped:
                return None
            number = next(self._numbers)
            answer: asyncio.Future[dict[str, Any] | None] = (
                asyncio.get_running_loop().create_future()
            )
            self._asked[number] = answer
            self._child.tell({"share": number})
            handle = await answer
            if handle is not None:
                return handle

    async def stop(self) -> None:
        """After its users have ended."""
        await self._child.stop(STOP_SECONDS)

    def _heard(self, message: dict[str, Any]) -> None:
        self._fatal = message.get("fatal", self._fatal)
        if "mapped" in message:
            self._mapped = True
            self._settled.set()
        if "held" in message:
            log.info("the weights are held on %s", message["held"])
            self._settled.set()
        if "shared" in message and (answer := self._asked.pop(message["shared"], None)):
            answer.set_result(message["handle"])

    async def _limit_load(self) -> None:
        try:
            async with asyncio.timeout(self._settings.load_timeout):
                await self._settled.wait()
        except TimeoutError:
            log.error("weights not loaded within %.0f s", self._settings.load_timeout)
            self._child.kill()

    def _answer_none(self) -> None:
        """Nobody answers any more who was asked before: ask the next one."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)
        self._asked.clear()


def needed(settings: ReplicaSettings) -> bool:
    """Whether to start a holder; it finds out itself whether "auto" is a GPU.

    Torch takes seconds to import and the parent does without: where the driver's library is
    missing there is no GPU.
    """
    if settings.engine != "torch":
        return False
    if settings.hold_weights or settings.device.startswith("cuda"):
        return True
    return settings.device == "auto" and _has_driver()


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def run(config_json: str, pipe: Connection) -> None:
    """Entry point of the child: torch is imported here and not in the parent."""
    from services.replica.weights_process import main

    main(config_json, pipe)
