"""``python -m services.dispatcher``: reads settings, builds, runs, handles signals."""

from __future__ import annotations

import asyncio
import signal
import sys

import uvloop

from services.dispatcher.policies.registry import UnknownPolicy, create
from services.dispatcher.service import Dispatcher
from services.dispatcher.settings import DispatcherSettings
from shared import logs
from shared.memory import few_arenas
from shared.settings import SettingsError, from_environment


async def _run(settings: DispatcherSettings) -> None:
    dispatcher = Dispatcher(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, dispatcher.stop)
    await dispatcher.run()


def main() -> int:
    few_arenas()
    try:
        settings = from_environment(DispatcherSettings)
        create(settings.policy, **settings.policy_options)
    except (SettingsError, UnknownPolicy) as e:
        print(e, file=sys.stderr)
        return 2
    logs.setup("dispatcher", settings.log_level, settings.log_format)
    uvloop.run(_run(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
