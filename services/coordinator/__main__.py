"""``python -m services.coordinator``: reads settings, builds, runs, handles signals."""

from __future__ import annotations

import sys

from services.coordinator.meters import Meters
from services.coordinator.service import ROLE, CoordinatorService
from services.coordinator.settings import CoordinatorSettings
from shared import process
from shared.leader import Leader


def _leader(settings: CoordinatorSettings) -> Leader:
    meters = Meters()
    service = CoordinatorService(settings, meters)
    return Leader(
        ROLE, settings.redis_url, meters.registry, settings.host, settings.port, service.act
    )


def main() -> int:
    return process.main(ROLE, CoordinatorSettings, _leader)


if __name__ == "__main__":
    sys.exit(main())
