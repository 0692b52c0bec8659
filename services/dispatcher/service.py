"""The dispatcher process: a leader whose acting loop is one run of ``Active``."""

from __future__ import annotations

from services.dispatcher.active import Active
from services.dispatcher.counters import Counters
from services.dispatcher.settings import DispatcherSettings
from shared.leader import Acting, Leader

ROLE = "dispatcher"
RED_AFTER_SECONDS = 5.0  # without a turn of the loop


class Dispatcher:
    """``leader`` runs the process; ``active`` is the run in progress while it holds the lease."""

    def __init__(self, settings: DispatcherSettings) -> None:
        self._settings = settings
        self._counters = Counters()
        self.active: Active | None = None
        self.leader = Leader(
            ROLE,
            settings.redis_url,
            self._counters.registry,
            settings.host,
            settings.port,
            self._act,
            red_after=RED_AFTER_SECONDS,
            starting="recovering",
        )

    async def _act(self, acting: Acting) -> None:
        self._counters.active.set(1)
        self.active = Active(acting, self._settings, self._counters)
        try:
            await self.active.run()
        finally:
            self.active = None
            self._counters.stand_by()
