"""``python -m services.dispatcher``: reads settings, builds, runs, handles signals."""

from __future__ import annotations

import sys

from services.dispatcher.policies.registry import UnknownPolicy, create
from services.dispatcher.service import ROLE, Dispatcher
from services.dispatcher.settings import DispatcherSettings
from shared import process
from shared.leader import Leader
from shared.settings import SettingsError


def _leader(settings: DispatcherSettings) -> Leader:
    try:
        create(settings.policy, **settings.policy_options)
    except UnknownPolicy as e:
        raise SettingsError(str(e)) from e
    return Dispatcher(settings).leader


def main() -> int:
    return process.main(ROLE, DispatcherSettings, _leader)


if __name__ == "__main__":
    sys.exit(main())
