"""``python -m services.gateway``: serve until SIGTERM (running answers are finished first)."""

from __future__ import annotations

import signal
import sys

import uvloop

from services.gateway.server import server, sockets
from services.gateway.service import Gateway
from services.gateway.settings import GatewaySettings
from shared import logs
from shared.api_keys import KeysError
from shared.memory import few_arenas
from shared.settings import SettingsError, from_environment


def main() -> int:
    few_arenas()
    try:
        settings = from_environment(GatewaySettings)
    except SettingsError as e:
        print(e, file=sys.stderr)
        return 2
    logs.setup("gateway", settings.log_level, settings.log_format)

    # uvicorn handles both while it serves and raises them again afterwards: the end was asked
    # for, so the process ends well.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

    async def run() -> bool:
        try:
            gateway = Gateway(settings)
        except (KeysError, SettingsError) as e:
            print(e, file=sys.stderr)
            return False
        http = server(gateway)
        await http.serve(sockets(http, gateway))
        return http.started

    return 0 if uvloop.run(run()) else 1


if __name__ == "__main__":
    sys.exit(main())
