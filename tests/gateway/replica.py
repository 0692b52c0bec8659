"""A stand-in for a replica's control side: loads adapters, keeps training data, answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from redis.asyncio import Redis

from shared import data_homes, names
from shared.messages import (
    BODY,
    DeleteData,
    LoadAdapter,
    StoreData,
    UnloadAdapter,
    decode_any,
)
from shared.replica_state import event


class Control:
    """Obeys the control stream of one replica. ``refuse`` names why adapters are refused."""

    def __init__(self, redis: Redis, replica: str, data_dir: Path) -> None:
        self.redis, self.replica, self.data_dir = redis, replica, data_dir
        self.adapters: dict[str, str] = {}
        self.refuse = ""
        self.silent = False

    async def run(self) -> None:
        last = "0"
        while True:
            found = await self.redis.xread({names.control(self.replica): last}, block=200)
            for entry, fields in found[0][1] if found else []:
                last = entry
                if not self.silent:
                    await self._obey(decode_any(fields[BODY]))

    async def _obey(self, command: object) -> None:
        if isinstance(command, StoreData | DeleteData):
            answer = await data_homes.obey(self.redis, self.data_dir, self.replica, command)
            await event(self.redis, **answer)
        elif isinstance(command, LoadAdapter):
            good = not self.refuse
            if good:
                self.adapters[command.name] = command.version
            await event(
                self.redis,
                "adapter_loaded" if good else "adapter_refused",
                replica=self.replica,
                adapter=command.name,
                reply_to=command.reply_to,
                ok="1" if good else "0",
                why=self.refuse,
            )
        elif isinstance(command, UnloadAdapter):
            self.adapters.pop(command.name, None)
            await event(
                self.redis,
                "adapter_unloaded",
                replica=self.replica,
                adapter=command.name,
                reply_to=command.reply_to,
                ok="1",
            )


@asynccontextmanager
async def controlled(redis: Redis, replica: str, data_dir: Path) -> AsyncIterator[Control]:
    control = Control(redis, replica, data_dir)
    task = asyncio.create_task(control.run())
    try:
        yield control
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
