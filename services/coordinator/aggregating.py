"""A round's aggregation on the server replica, over blobs or a process group; if the server
dies the next best takes over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from services.coordinator.context import Context
from services.coordinator.jobs import JobFailed, job_id
from services.coordinator.paths import choose_backend
from services.coordinator.settings import TrainingOptions
from shared.records import ReplicaRecord
from shared.replica_state import State
from shared.rounds import (
    AGGREGATE,
    SEND_UPDATE,
    AggregateJob,
    AggregateResult,
    Group,
    Lora,
    RoundResult,
    SendJob,
    SendResult,
    Update,
)
from shared.sessions import Session

log = logging.getLogger(__name__)


class NoAggregate(RuntimeError):
    """No server could aggregate the round; the message holds each one's reason."""


class Aggregation:
    """``run`` returns the result and the server that made it."""

    def __init__(
        self,
        context: Context,
        session: Session,
        options: TrainingOptions,
        lora: Lora,
        parent_path: str,
        results: Mapping[str, RoundResult],
        exchange: str,
    ) -> None:
        self._context, self._session, self._options = context, session, options
        self._lora, self._parent_path = lora, parent_path
        self._results, self._exchange = results, exchange

    async def run(self) -> tuple[AggregateResult, str]:
        """Raises NoAggregate."""
        reasons = []
        for server in servers(await self._context.cluster.live(), self._session):
            try:
                return await self._on(server), server
            except (JobFailed, TimeoutError) as e:
                reasons.append(f"{server}: {e or 'no answer in time'}")
                log.warning("session %s: aggregation on %s", self._session.id, reasons[-1])
                await self._context.tell(
                    "server_failed", self._session, replica=server, why=str(e) or "no answer"
                )
                if "no usable update" in str(e):
                    break  # another server would find the same
        raise NoAggregate("; ".join(reasons) or "no live replica can aggregate")

    async def _on(self, server: str) -> AggregateResult:
        exchange = self._exchange
        if exchange == "group":
            try:
                return await self._over_group(server)
            except (JobFailed, TimeoutError) as e:
                if await self._context.cluster.record(server) is None:
                    raise
                await self._context.tell(
                    "exchange_fallback", self._session, replica=server, why=f"{e or 'timeout'}"
                )
            await self._upload()
            exchange = "late"
        return await self._aggregate(server, None, exchange)

    async def _over_group(self, server: str) -> AggregateResult:
        """All members at once: the others send while the server receives."""
        others = sorted(c for c in self._results if c != server)
        if not others:
            return await self._aggregate(server, None, "group")
        members = (server, *others)
        group_id = self._id("group", server)
        timeout = self._context.settings.exchange_timeout
        live = await self._context.cluster.live()
        how = choose_backend([live.get(m, ReplicaRecord(id=m)) for m in members])

        def group(rank: int) -> Group:
            return Group(id=group_id, rank=rank, members=members, backend=how, timeout=timeout)

        sending = asyncio.gather(
            *(self._send(c, group(rank), "group") for rank, c in enumerate(others, start=1))
        )
        try:
            return await self._aggregate(server, group(0), "group")
        finally:
            await sending  # each ends by itself within the group's timeout

    async def _send(self, client: str, group: Group | None, how: str) -> SendResult | None:
        """A sender that fails is the receiver's trouble: it times out and says so."""
        s = self._session
        job = SendJob(
            session=s.id,
            round=s.round,
            adapter=s.adapter,
            group=group,
            blob=self._blob(client),
        )
        name = self._id(f"send-{how}", client)
        limit = self._context.settings.exchange_timeout * 2
        try:
            return await self._context.jobs.run(client, name, SEND_UPDATE, job, SendResult, limit)
        except (JobFailed, TimeoutError) as e:
            await self._context.tell("send_failed", s, replica=client, why=str(e) or "no answer")
            return None

    async def _upload(self) -> None:
        """The group broke: the kept updates go through Redis instead.

        Counted here, as no result of the round does; what a group moves its receiver reports.
        """
        meters = self._context.meters
        sent = [self._send(client, None, "redis") for client in self._results]
        for done in await asyncio.gather(*sent):
            if done is not None:
                meters.exchange_bytes.labels("redis").inc(done.bytes)
                meters.exchange_seconds.labels("redis").inc(done.seconds)

    async def _aggregate(self, server: str, group: Group | None, how: str) -> AggregateResult:
        s = self._session
        job = AggregateJob(
            session=s.id,
            round=s.round,
            server=server,
            adapter=s.adapter,
            base=s.base,
            parent=s.parent,
            parent_path=self._parent_path,
            version=s.version,
            lora=self._lora,
            strategy=self._options.strategy,
            options=self._options.server_options,
            updates=tuple(self._update(c, r) for c, r in sorted(self._results.items())),
            group=group,
        )
        name = self._id(f"aggregate-{how}", server)
        return await self._while_alive(server, name, job)

    async def _while_alive(self, server: str, name: str, job: AggregateJob) -> AggregateResult:
        """The job's result, unless the server dies first (then JobFailed at once)."""
        limit = self._context.settings.job_seconds
        work = asyncio.ensure_future(
            self._context.jobs.run(server, name, AGGREGATE, job, AggregateResult, limit)
        )
        try:
            while True:
                done, _ = await asyncio.wait({work}, timeout=0.5)
                if done:
                    return work.result()
                if await self._context.cluster.record(server) is None:
                    raise JobFailed("its heartbeat is lost")
        finally:
            work.cancel()

    def _update(self, client: str, result: RoundResult) -> Update:
        return Update(
            client=client,
            round=result.round,
            base=result.base,
            parent=result.parent,
            examples=result.examples,
            lora=result.lora,
            blob=result.blob or self._blob(client),
        )

    def _blob(self, client: str) -> str:
        return self._id("train", client)

    def _id(self, what: str, replica: str) -> str:
        s = self._session
        return job_id(s.id, f"r{s.round}", f"a{s.attempt}", what, replica)


def servers(live: Mapping[str, ReplicaRecord], session: Session) -> list[str]:
    """Who may aggregate, in order: the session's server, then by quality, lowest id first."""
    able = [
        r
        for r in live.values()
        if r.model == session.base and r.id in session.clients and r.state == State.COMBINED
    ]
    ordered = sorted(able, key=lambda r: (r.id != session.server, -r.q, r.id))
    return [r.id for r in ordered]
