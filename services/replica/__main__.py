"""``python -m services.replica``: one replica (or several emulated ones) of a base model."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import uvloop

from services.replica.children import GaveUp
from services.replica.incarnation import IdInUse
from services.replica.settings import ReplicaSettings
from services.replica.supervisor import Supervisor
from services.replica.training.settings import TrainingSettings
from shared import logs
from shared.settings import Settings, SettingsError, from_environment

log = logging.getLogger(__name__)


async def run(settings: ReplicaSettings, training: dict[str, object]) -> int:
    """Serve until SIGTERM or SIGINT; a second one hurries the end. Returns the exit code."""
    supervisor = Supervisor(settings, training)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.request_stop)
    code = 0
    try:
        await supervisor.run()
    except* (GaveUp, IdInUse) as group:
        for error in group.exceptions:
            log.critical("%s", error)
        code = 1
    return code


def main() -> int:
    """Read the settings, run."""
    try:
        settings = from_environment(ReplicaSettings)
        training = from_environment(TrainingSettings)
    except SettingsError as e:
        print(e, file=sys.stderr)
        return 2
    logs.setup(settings.replicas[0], settings.log_level, settings.log_format)
    own = training.model_dump(mode="json", exclude=set(Settings.model_fields))
    code: int = uvloop.run(run(settings, own))
    return code


if __name__ == "__main__":
    sys.exit(main())
