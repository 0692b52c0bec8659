"""How a control process runs: settings, log, signals, an orderly end."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

import uvloop

from shared import logs
from shared.memory import few_arenas
from shared.settings import Settings, SettingsError, from_environment

S = TypeVar("S", bound=Settings)


class Service(Protocol):
    """What runs until it is told to stop."""

    async def run(self) -> None: ...

    def stop(self) -> None: ...


def main(role: str, kind: type[S], make: Callable[[S], Service]) -> int:
    """Run what ``make`` builds until SIGTERM or SIGINT; returns the exit code, 2: bad settings.

    ``make`` may raise SettingsError, too.
    """
    few_arenas()

    async def serve(settings: S) -> None:
        service = make(settings)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, service.stop)
        await service.run()

    try:
        settings = from_environment(kind)
        logs.setup(role, settings.log_level, settings.log_format)
        uvloop.run(serve(settings))
    except SettingsError as e:
        print(e, file=sys.stderr)
        return 2
    return 0
