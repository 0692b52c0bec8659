"""Idle detection on virtual time: the launcher's own core decides who is Idle and who trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.coordinator import search
from services.coordinator.search import Demand
from services.dispatcher.demand_meter import DemandMeter
from services.launcher.core import Launcher
from services.launcher.gathering import Proposal
from services.launcher.terms import (
    Back,
    Decision,
    Join,
    Leave,
    Seen,
    SessionSeen,
    ToIdle,
)
from services.launcher.windows import Load
from shared.replica_state import ANSWERING, State
from sim.events import tick
from sim.rounds import Federated, Rounds, Session
from sim.training import Curve

if TYPE_CHECKING:
    from sim.job import Job
    from sim.world import World

BASE, ADAPTER = "base", "adapter"


class Federation:
    """What the launcher is shown of the simulated cluster, and what it decides."""

    def __init__(self, world: World, options: Federated, curve: Curve) -> None:
        self._world, self._options = world, options
        self._launcher = Launcher(options.launcher)
        self._arrivals = 0
        self._meter = DemandMeter()
        self._finished: dict[str, int] = {}
        self._busy: dict[str, float] = {}
        self.rounds = Rounds(world, options, curve, self.demand)
        world.kernel.push(options.launcher.tick, tick.handle, self)

    # ------------------------------------------------------------ what is seen

    def arrived(self, job: Job) -> None:
        self._arrivals += 1
        self._meter.arrived(job.request, self._world.kernel.now)

    def released(self, job: Job) -> None:
        self._meter.released(job.request, self._world.kernel.now)

    def finished(self, job: Job, replica: str) -> None:
        self._finished[replica] = self._finished.get(replica, 0) + 1
        self._meter.answered(job.request, job.output)

    def demand(self) -> Demand:
        """What the dispatcher tells the coordinator of the load."""
        said = self._meter.summary(self._world.kernel.now)
        return Demand(
            rate=said.rate,
            prompt=said.prompt or 128.0,
            output=said.output or 128.0,
            budget=said.budget,
            slo=said.slo,
            tpot=said.tpot,
            limited_prompt=said.limited_prompt,
            limited_output=said.limited_output,
            headroom=self._options.launcher.headroom,
        )

    def _seen(self, name: str, demand: Demand) -> Seen:
        world, o = self._world, self._options
        replica, trainer = world.replicas[name], world.replicas[name].trainer
        busy = replica.busy_until(world.kernel.now)
        used = (busy - self._busy.get(name, 0.0)) / o.launcher.tick
        self._busy[name] = busy
        member = self.rounds.member(name, demand)
        return Seen(
            id=name,
            base=BASE,
            state=world.states[name].value,
            load=Load(
                utilisation=min(1.0, used), queued=len(replica.waiting), b=float(replica.running)
            ),
            rate=search.rate(member, 0 if trainer is None else trainer.B, demand),
            rate_training=search.rate(member, o.B0, demand),
            finished=self._finished.pop(name, 0),
            quality=world.quality[name],
            data={ADAPTER: o.samples},
            fresh={ADAPTER: o.samples},
            suspended=trainer is not None and (trainer.suspended or trainer.B == 0),
        )

    # ------------------------------------------------------------ a tick of the launcher

    def tick(self) -> None:
        """Look, decide, carry out; then the next tick."""
        world, seconds = self._world, self._options.launcher.tick
        self.rounds.note_training()
        if world.more_to_come:
            world.kernel.push(world.kernel.now + seconds, tick.handle, self)
        if self._options.dedicated:
            return
        demand = self.demand()
        seen = [self._seen(n, demand) for n, state in world.states.items() if state in ANSWERING]
        session = self.rounds.session
        sessions = [] if session is None else [self._session_seen(session)]
        arrivals = {BASE: float(self._arrivals)}
        self._arrivals = 0
        for decision in self._launcher.tick(seen, arrivals, sessions, world.kernel.now):
            self._carry_out(decision)

    @staticmethod
    def _session_seen(session: Session) -> SessionSeen:
        return SessionSeen(
            id=session.id,
            adapter=ADAPTER,
            base=BASE,
            clients=tuple(session.clients),
            losses=session.losses,
        )

    def _carry_out(self, decision: Decision) -> None:
        world = self._world
        match decision:
            case ToIdle(replica=name):
                world.move(name, State.IDLE)
            case Back(replica=name):
                world.move(name, State.SERVING)
            case Proposal(clients=clients):
                self.rounds.open(clients)
            case Join(replica=name):
                self.rounds.join(name)
            case Leave(replica=name):
                self.rounds.leave(name)
            case _:
                return  # it only says what it waits for
