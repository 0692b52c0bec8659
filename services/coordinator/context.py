"""What all sessions of one coordinator share."""

from __future__ import annotations

from dataclasses import dataclass, field

from redis.asyncio import Redis

from services.coordinator.cluster import Cluster
from services.coordinator.jobs import TrainingJobs
from services.coordinator.meters import Meters
from services.coordinator.search import Choice, Demand, Member, search
from services.coordinator.settings import CoordinatorSettings, TrainingOptions
from services.coordinator.telemetry import Telemetry
from shared import demand, sessions
from shared.adapters import AdapterRegistry
from shared.clock import Now
from shared.lease import Lease
from shared.replica_state import event
from shared.sessions import Session

SUSPENDED_SECONDS = 120.0


@dataclass
class Context:
    """Built once a time that this process holds the lease."""

    redis: Redis
    lease: Lease
    now: Now
    settings: CoordinatorSettings
    registry: AdapterRegistry
    jobs: TrainingJobs
    cluster: Cluster
    telemetry: Telemetry
    meters: Meters
    wanted_idle: dict[str, float] = field(default_factory=dict)  # replica -> until when B = 0

    @property
    def suspended(self) -> set[str]:
        """Replicas on which the dispatcher wants B = 0.

        A wish that is not renewed ends by itself: a dispatcher that was restarted has forgotten
        it, and the search for B keeps what the load needs in any case.
        """
        now = self.now()
        return {replica for replica, until in self.wanted_idle.items() if until > now}

    async def save(self, session: Session) -> None:
        """Write a session's record; Redis refuses once another coordinator acts."""
        await sessions.save(self.redis, session, self.lease.fence_key, self.lease.token)

    async def tell(self, kind: str, session: Session, **fields: str | int | float) -> None:
        """An event of a session, with the round it is about."""
        await event(
            self.redis,
            kind,
            session=session.id,
            adapter=session.adapter,
            round=session.round,
            **fields,
        )

    async def demand(self, base: str) -> Demand:
        """As the dispatcher says; without it what replicas report as finished."""
        said = await demand.read(self.redis, base)
        headroom = self.settings.headroom
        prompt, output = self.telemetry.lengths(base)
        if said is None:
            slo = self.settings.slo_seconds
            return Demand(
                rate=self.telemetry.rate(base, self.now()),
                prompt=prompt,
                output=output,
                budget=slo,
                slo=slo,
                headroom=headroom,
            )
        return Demand(
            rate=said.rate,
            prompt=said.prompt or prompt,
            output=said.output or output,
            budget=said.budget,
            slo=said.slo,
            tpot=said.tpot,
            limited_prompt=said.limited_prompt,
            limited_output=said.limited_output,
            headroom=headroom,
        )

    async def choose(self, session: Session, options: TrainingOptions) -> dict[str, Choice]:
        """(B*, b*) of the session's clients, against all dispatchable replicas of the base."""
        now, members = self.now(), []
        micro_steps = options.local_steps * options.accumulation
        fixed = self.telemetry.round_cost(session.adapter) / micro_steps
        for name, record in (await self.cluster.live()).items():
            trains = name in session.clients
            if record.model != session.base or not (trains or record.state == "serving"):
                continue
            members.append(
                Member(
                    id=name,
                    model=self.telemetry.planes(name, now).model(),
                    b_max=record.b_max,
                    quality=record.q,
                    trains=trains,
                    B=record.B_star,
                    progress=self.telemetry.progress(session.adapter, name),
                    B0=options.B0,
                    B_max=options.B_max,
                    accumulation=options.accumulation,
                    fixed=fixed,
                    suspended=name in self.suspended,
                )
            )
        wanted = await self.demand(session.base)
        if session.alone:  # no load is theirs, so none is a reason to train less
            wanted = Demand(prompt=wanted.prompt, output=wanted.output)
        choices = search(members, wanted)
        return {name: _fixed(choice, options) for name, choice in choices.items()}


def _fixed(choice: Choice, options: TrainingOptions) -> Choice:
    """The pair that the options fix, if they do; a suspension still wins."""
    if not (options.micro_batch or options.concurrency) or "asked for B = 0" in choice.why:
        return choice
    return Choice(
        B=options.micro_batch or choice.B,
        b=options.concurrency or choice.b,
        goodput=choice.goodput,
        rate=choice.rate,
        needed=choice.needed,
        why="fixed by the training options",
    )
