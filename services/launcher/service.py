"""The launcher's loop: look, decide, carry out, once a tick."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.launcher.core import Launcher
from services.launcher.gathering import Proposal, Waiting
from services.launcher.observer import Observer, Picture
from services.launcher.settings import LauncherSettings
from services.launcher.terms import Back, Decision, Join, Leave, ToIdle
from shared import sessions
from shared.adapters import AdapterRegistry
from shared.leader import Acting
from shared.replica_state import ANSWERING, Refused, State, event, move

log = logging.getLogger(__name__)

ROLE = "launcher"


class Meters:
    """Prometheus series of the launcher."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.decisions = Counter(
            "collm_launcher_decisions", "Decisions carried out", ["kind"], registry=self.registry
        )
        self.refused = Counter(
            "collm_launcher_refused", "Transitions that came too late", registry=self.registry
        )
        self.rate = Gauge(
            "collm_arrival_rate", "Requests per second", ["model_name"], registry=self.registry
        )
        self.mode = Gauge(
            "collm_replica_mode", "1 in the replica's state", ["replica", "mode"],
            registry=self.registry,
        )  # fmt: skip
        self.utilisation = Gauge(
            "collm_replica_utilisation",
            "Of the last tick, serving only; source: sm_util, utilization.gpu or step_share",
            ["replica", "source"],
            registry=self.registry,
        )

    def clear(self) -> None:
        """This process does not act (any more)."""
        for gauge in (self.mode, self.rate, self.utilisation):
            gauge.clear()

    def show(self, picture: Picture, launcher: Launcher) -> None:
        """Series of replicas that are gone disappear."""
        self.clear()
        for seen in picture.replicas:
            if seen.load is not None:
                source = seen.load.source
                self.utilisation.labels(seen.id, source).set(seen.load.utilisation)
            for mode in sorted(ANSWERING):
                self.mode.labels(seen.id, mode).set(1 if seen.state == mode else 0)
        for base in picture.arrivals:
            self.rate.labels(base).set(launcher.rate(base))


class LauncherService:
    """``act`` is what the process does while it holds the lease."""

    def __init__(self, settings: LauncherSettings, meters: Meters) -> None:
        self._settings, self._meters = settings, meters

    async def act(self, acting: Acting) -> None:
        """Until cancelled. The books start empty: windows fill anew after a restart."""
        registry = AdapterRegistry(acting.redis, self._settings.data_dir)
        observer = Observer(acting.redis, registry, self._settings)
        launcher = Launcher(self._settings.options())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(observer.watch(), name="metrics")
                group.create_task(self._tick(acting, observer, launcher), name="ticks")
        finally:
            self._meters.clear()

    async def _tick(self, acting: Acting, observer: Observer, launcher: Launcher) -> None:
        due = time.monotonic()
        while True:
            due = max(due + self._settings.tick, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            picture = await observer.look()
            decisions = launcher.tick(
                picture.replicas, picture.arrivals, picture.sessions, acting.clock()
            )
            self._meters.show(picture, launcher)
            for decision in decisions:
                await self._carry_out(acting, decision, picture)
            acting.alive()

    async def _carry_out(self, acting: Acting, decision: Decision, picture: Picture) -> None:
        """A transition that came too late is told and forgotten: the next tick looks again."""
        kind = type(decision).__name__.lower()
        try:
            await self._do(acting, decision, picture)
        except Refused as e:
            log.info("%s refused: %s", kind, e)
            self._meters.refused.inc()
            return
        self._meters.decisions.labels(kind).inc()

    async def _do(self, acting: Acting, decision: Decision, picture: Picture) -> None:
        redis = acting.redis
        match decision:
            case ToIdle(replica=name, why=why):
                incarnation = picture.records[name].incarnation
                await move(
                    redis,
                    name,
                    State.IDLE,
                    by=ROLE,
                    why=f"idle: {_words(why)}",
                    expected=frozenset({State.SERVING}),
                    incarnation=incarnation,
                )
            case Back(replica=name, why=why):
                text = f"not selected: {_words(why)}"
                only = frozenset({State.IDLE})
                await move(redis, name, State.SERVING, by=ROLE, why=text, expected=only)
            case Proposal():
                await self._open(acting, decision)
            case Waiting(adapter=adapter, why=why):
                await event(redis, "session_waits", adapter=adapter, why=why)
            case Join(session=session, replica=name, why=why):
                await sessions.wish(redis, session, f"join:{name}", _words(why))
                await event(redis, "join", session=session, replica=name, why=_words(why))
            case Leave(session=session, replica=name, why=why):
                await sessions.wish(redis, session, f"leave:{name}", _words(why))
                await event(redis, "leave", session=session, replica=name, why=_words(why))

    async def _open(self, acting: Acting, proposal: Proposal) -> None:
        session = sessions.Session(
            id=sessions.new_id(proposal.adapter),
            adapter=proposal.adapter,
            base=proposal.base,
            clients=proposal.clients,
            server=proposal.server,
            why=proposal.why,
            least=min(sessions.LEAST, len(proposal.clients)),
            alone=bool(self._settings.dedicated),
        )
        opened = await sessions.open_session(acting.redis, session)
        if opened != session.id:
            log.info("adapter %s is in session %s already", proposal.adapter, opened)


def _words(why: Mapping[str, float | str]) -> str:
    """The numbers of a decision in one line: ``U=0.012 U_switch=0.25 …``."""
    parts = []
    for name, value in why.items():
        parts.append(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}")
    return " ".join(parts)
