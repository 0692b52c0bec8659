"""``python -m services.coordinator``: reads settings, builds, runs, handles signals."""

from __future__ import annotations

import asyncio
import signal
import sys

import uvloop

from services.coordinator.meters import Meters
from services.coordinator.service import ROLE, CoordinatorService
from services.coordinator.settings import CoordinatorSettings
from shared import logs
from shared.leader import Leader
from shared.memory import few_arenas
from shared.settings import SettingsError, from_environment


async def _run(settings: CoordinatorSettings) -> None:
    meters = Meters()
    service = CoordinatorService(settings, meters)
    leader = Leader(
        ROLE, settings.redis_url, meters.registry, settings.host, settings.port, service.act
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leader.stop)
    await leader.run()


def main() -> int:
    try:
        settings = from_environment(CoordinatorSettings)
    except SettingsError as e:
        print(e, file=sys.stderr)
        return 2
    few_arenas()
    logs.setup(ROLE, settings.log_level, settings.log_format)
    uvloop.run(_run(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
