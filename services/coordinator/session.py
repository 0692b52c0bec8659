"""One federated session: the loop that reads like the paper.

Source: CoLLM (arXiv 2604.16400), federated fine-tuning. Every step follows from the session's
record and from jobs whose ids follow from it, so a coordinator that takes the record up repeats
a step without doing its work twice: jobs are found again, a version is published once.
"""

from __future__ import annotations

import asyncio
import logging

from msgspec.structs import replace

from services.coordinator.aggregating import Aggregation, NoAggregate
from services.coordinator.checking import Check, check
from services.coordinator.context import Context
from services.coordinator.jobs import JobFailed, job_id
from services.coordinator.meters import RoundFailure
from services.coordinator.opening import Opening
from services.coordinator.publishing import publish
from services.coordinator.settings import BadOptions
from services.coordinator.training import Training, restored, stored
from shared import sessions
from shared.adapter_files import BadFolder, BadName
from shared.adapters import Conflict, Unknown
from shared.replica_state import State
from shared.rounds import AggregateResult, RoundResult
from shared.sessions import Phase, Session
from shared.stopwatch import Stopwatch, in_words

log = logging.getLogger(__name__)

MISSED_LIMIT = 2  # rounds in a row without quorum, or without a promoted version
PAUSE_LOOK = 1.0  # seconds between looks while a session rests


class SessionRun:
    """``run`` takes a session to its end. One object a session and coordinator."""

    def __init__(self, context: Context, session: Session) -> None:
        self._context, self._session = context, session
        self._opening = Opening(context)
        self._first_step_told = session.done > 0
        self._watch = Stopwatch()  # of the round in work

    async def run(self) -> None:
        """Rounds until something ends the session; the reason goes into its event."""
        try:
            why = await self._rounds()
        except (BadOptions, BadFolder, BadName, Conflict, Unknown, JobFailed) as e:
            why = f"failed: {e}"
        except TimeoutError:
            why = "failed: a training process did not answer in time"
        await self._end(why)

    async def _rounds(self) -> str:
        session = self._session
        await self._opening.prepare(session)
        while (why := await self._begin()) is None:
            with self._watch.stage("clients"):
                results, exchange = await self._train()
            if not self._quorum(results):
                why = f"{len(results)} of {len(self._session.clients)} handed over"
                await self._miss("quorum", why)
                continue
            try:
                with self._watch.stage("aggregate"):
                    made = await self._aggregate(results, exchange)
            except NoAggregate as e:
                await self._miss("aggregation", str(e))
                continue
            with self._watch.stage("check"):
                checked = await self._check(results, made)
            await self._publish(results, made, checked)
        return why

    # ------------------------------------------------------------ configure

    async def _begin(self) -> str | None:
        """Membership, versions and batch sizes of the next round; why the session ends, if so."""
        while True:
            await self._obey_wishes()
            if (why := self._over()) is not None:
                return why
            if self._session.phase != Phase.OPEN:
                log.info("session %s is taken up in %s", self._session.id, self._session.phase)
                return None
            if self._session.paused:
                await asyncio.sleep(PAUSE_LOOK)
                continue
            self._watch = Stopwatch()
            with self._watch.stage("configure"):
                opened = await self._configure()
            if opened:
                return None
            await asyncio.sleep(PAUSE_LOOK)

    async def _obey_wishes(self) -> None:
        """Joining and leaving happen between rounds only."""
        s, context = self._session, self._context
        wanted = await sessions.wishes(context.redis, s.id)
        if wanted.stop:
            s = replace(s, ended=wanted.stop)
        if wanted.pause != s.paused:
            s = replace(s, paused=wanted.pause)
            await context.tell("session_paused" if wanted.pause else "session_resumed", s)
        if s.phase == Phase.OPEN:
            s = await self._change_members(s, wanted)
        self._session = s
        await context.save(s)

    async def _change_members(self, s: Session, wanted: sessions.Wishes) -> Session:
        context, clients = self._context, list(s.clients)
        for client, why in sorted(wanted.leave.items()):
            if client in clients:
                clients.remove(client)
                await context.cluster.release(client, f"leaves session {s.id}: {why}")
        for client in sorted(wanted.join):
            if client not in clients and await context.cluster.combine(client, s.id):
                clients.append(client)
        staying = []
        for client in sorted(clients):
            if await context.cluster.combine(client, s.id):
                staying.append(client)
            else:
                await context.tell("client_left", s, replica=client, why="not Idle or Combined")
        taken = [f"leave:{c}" for c in wanted.leave] + [f"join:{c}" for c in wanted.join]
        await sessions.unwish(context.redis, s.id, *taken)
        return replace(s, clients=tuple(staying))

    def _over(self) -> str | None:
        s = self._session
        if s.ended:
            return s.ended
        if s.phase != Phase.OPEN:
            return None
        if len(s.clients) < s.least:
            return f"{len(s.clients)} {sessions.TOO_FEW}, {s.least} needed"
        if s.missed >= MISSED_LIMIT:
            return f"{s.missed} rounds in a row failed"
        if s.kept_back >= MISSED_LIMIT:
            return f"held-out loss rose {s.kept_back} times"
        if s.done >= self._opening.options.max_rounds:
            return f"{s.done} rounds done"
        return None

    async def _configure(self) -> bool:
        """Open the next round; False when load leaves no client a training batch."""
        s, context, opening = self._session, self._context, self._opening
        now = context.now()
        await opening.refresh(s)
        choices = await context.choose(s, opening.options)
        B = opening.batches(s, choices, context.suspended)
        if not any(B.values()) and s.B == B:
            return False  # told and configured already
        for client, choice in sorted(choices.items()):
            b = choice.b if s.done > 0 or opening.options.concurrency else None
            await context.cluster.configure(client, b=b, B=B[client])
            context.meters.goodput.labels(client).set(choice.goodput)
        if not any(B.values()):
            self._session = replace(s, B=B)
            await context.save(self._session)
            await context.tell("round_waits", s, why="load leaves no client a training batch")
            return False
        live = await context.cluster.live()
        number = await opening.next_round(s)
        attempt = s.attempt + 1 if number == s.round else 1
        self._session = replace(
            s,
            phase=Phase.TRAIN,
            round=number,
            attempt=attempt,
            parent=opening.parent.version,
            version=await opening.new_version(s, number, attempt),
            started=now,
            deadline=now + opening.expected(s, B),
            B=B,
            results={},
            heldout=s.heldout if s.heldout_of == opening.parent.version else {},
            samples={**s.samples, **opening.samples(s, live)},
            server=s.server if s.server in s.clients else opening.best(s, live),
        )
        await context.save(self._session)
        await self._tell_begin()
        return True

    async def _tell_begin(self) -> None:
        s, meters = self._session, self._context.meters
        meters.round.labels(s.adapter).set(s.round)
        meters.participants.labels(s.adapter).set(len(s.clients))
        batches = " ".join(f"{c}:B={B}" for c, B in sorted(s.B.items()))
        await self._context.tell(
            "round_began",
            s,
            clients=",".join(s.clients),
            server=s.server,
            parent=s.parent,
            batches=batches,
            deadline_s=round(s.deadline - s.started, 1),
        )

    # ------------------------------------------------------------ train, gather

    async def _train(self) -> tuple[dict[str, RoundResult], str]:
        s, opening = self._session, self._opening
        training = Training(
            self._context, s, opening.options, opening.lora, await opening.path_of(s.parent, s)
        )
        if s.phase != Phase.TRAIN and s.results:
            return restored(s.results), training.exchange
        results = await training.run()
        await self._tell_first_step(results)
        self._session = replace(s, phase=Phase.AGGREGATE, results=stored(results))
        await self._context.save(self._session)
        return results, training.exchange

    async def _tell_first_step(self, results: dict[str, RoundResult]) -> None:
        """Once a session, with what lay between its opening and its first micro-step."""
        begun = [r for r in results.values() if r.first_step > 0]
        if not begun or self._first_step_told:
            return
        self._first_step_told = True
        s, first = self._session, min(begun, key=lambda r: r.first_step)
        stages = {
            "opening": s.started - s.created,
            "queue": first.started - s.started,
            "prepare": first.first_step - first.started,
        }
        seconds = round(first.first_step - s.created, 3)
        await self._context.tell("first_step", s, seconds=seconds, stages=in_words(stages))

    def _quorum(self, results: dict[str, RoundResult]) -> bool:
        """All, or at least two at the deadline."""
        return len(results) >= min(2, len(self._session.clients)) and bool(results)

    async def _miss(self, reason: RoundFailure, why: str) -> None:
        """The round fails: the adapter stays as it was."""
        s = self._session
        self._context.meters.failures.labels(reason).inc()
        self._session = replace(s, phase=Phase.OPEN, missed=s.missed + 1, results={})
        await self._context.save(self._session)
        await self._context.tell("round_failed", s, why=why, missed=s.missed + 1)

    # ------------------------------------------------------------ aggregate, check, publish

    async def _aggregate(self, results: dict[str, RoundResult], exchange: str) -> AggregateResult:
        s, opening = self._session, self._opening
        aggregation = Aggregation(
            self._context,
            s,
            opening.options,
            opening.lora,
            await opening.path_of(s.parent, s),
            results,
            exchange,
        )
        made, server = await aggregation.run()
        self._session = replace(s, phase=Phase.CHECK, server=server)
        await self._context.save(self._session)
        return made

    async def _check(self, results: dict[str, RoundResult], made: AggregateResult) -> Check:
        """By the clients that trained: the others' training processes may be stuck."""
        s, opening = self._session, self._opening
        parent = await opening.path_of(s.parent, s)
        return await check(self._context, s, opening.options, results, parent, made.path)

    async def _publish(
        self, results: dict[str, RoundResult], made: AggregateResult, checked: Check
    ) -> None:
        context, opening = self._context, self._opening
        self._session = await publish(
            context, opening, self._session, results, made, checked, self._watch.seconds
        )
        await context.save(self._session)

    # ------------------------------------------------------------ end

    async def _end(self, why: str) -> None:
        """All members serve again; their data counts as learnt; the event says why."""
        s, context = self._session, self._context
        running = [job_id(s.id, f"r{s.round}", f"a{s.attempt}", "train", c) for c in s.clients]
        await context.jobs.stop(running)
        for client in s.clients:
            record = await context.cluster.record(client)
            if record is not None and record.state == State.COMBINED:
                await context.cluster.release(client, f"session {s.id} ended: {why}")
        if s.done > 0 and (adapter := await context.registry.get(s.adapter)) is not None:
            await context.registry.set_trained(s.adapter, {**adapter.trained, **s.samples})
        await sessions.end(context.redis, s, why, context.lease.fence_key, context.lease.token)
        context.meters.forget(s.adapter)
        log.info("session %s ended after %d rounds: %s", s.id, s.done, why)
