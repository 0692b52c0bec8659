"""``python -m services.launcher``: reads settings, builds, runs, handles signals."""

from __future__ import annotations

import sys

from services.launcher.service import ROLE, LauncherService, Meters
from services.launcher.settings import LauncherSettings
from shared import process
from shared.leader import Leader


def _leader(settings: LauncherSettings) -> Leader:
    meters = Meters()
    service = LauncherService(settings, meters)
    return Leader(
        ROLE, settings.redis_url, meters.registry, settings.host, settings.port, service.act
    )


def main() -> int:
    return process.main(ROLE, LauncherSettings, _leader)


if __name__ == "__main__":
    sys.exit(main())
