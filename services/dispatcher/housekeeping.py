"""Once a second: gateways that are gone, completions that no sample told of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import Counter
from redis.asyncio import Redis

from services.dispatcher.desk import Desk
from services.dispatcher.recovery import keys_in
from services.dispatcher.scripts import FORGET_GATEWAY, Call, run
from services.dispatcher.watch import Trust
from shared import names
from shared.clock import RedisClock
from shared.lease import Lease
from shared.messages import StepSample

log = logging.getLogger(__name__)

Report = Callable[[float], None]

OLD_SECONDS = 2.0  # a request in flight longer than this, on a replica with an empty stream, left
GATEWAY_MISSES = 2
SWEEP_ROUNDS = 15  # how long late replies to a gateway that is gone are swept up


class Housekeeping:
    """Returns reports: changes of the books, to be applied by the loop."""

    def __init__(
        self, redis: Redis, lease: Lease, clock: RedisClock, trust: Trust, reconciled: Counter
    ) -> None:
        """``reconciled`` counts the requests that a comparison found to have left."""
        self._redis, self._lease, self._clock, self._trust = redis, lease, clock, trust
        self._reconciled = reconciled
        self._sequences: dict[tuple[str, str], int] = {}
        self._suspects: set[str] = set()
        self._empty: dict[str, int] = {}
        self._gateway_misses: dict[str, int] = {}
        self._swept: dict[str, int] = {}

    def in_sequence(self, sample: StepSample) -> bool:
        """Whether no sample of the replica was missed; one that follows a gap is a suspect."""
        key = (sample.replica, sample.incarnation)
        last = self._sequences.get(key)
        if last is None:
            for old in [k for k in self._sequences if k[0] == sample.replica]:
                del self._sequences[old]
        self._sequences[key] = sample.seq
        if last is None or sample.seq <= last + 1:
            return True
        self.suspect(sample.replica)
        return False

    def suspect(self, replica: str) -> None:
        """Completions there may have gone by: compare the books with its stream."""
        self._suspects.add(replica)

    async def round(self, desks: Mapping[str, Desk]) -> list[Report]:
        now_open = list(desks.values())  # a further one may open meanwhile
        return await self._reconcile(now_open) + await self._gateways(now_open)

    # ------------------------------------------------------------ completions

    async def _reconcile(self, desks: Iterable[Desk]) -> list[Report]:
        reports: list[Report] = []
        for desk in desks:
            holders = {flight.replica for flight in desk.flying.values()}
            await self._find_empty(desk, sorted(holders))
            for replica in holders & self._suspects:
                asked = self._clock()
                present = await keys_in(self._redis, replica)
                reports.append(self._comparison(desk, replica, present, asked))
                if not present and desk.comparable(replica, asked):
                    self._suspects.discard(replica)
        return reports

    def _comparison(self, desk: Desk, replica: str, present: set[str], asked: float) -> Report:
        def report(now: float) -> None:
            left = desk.reconcile(replica, present, asked, now)
            self._reconciled.inc(left)
            if left:
                log.info("%d requests had left %s unnoticed", left, replica)

        return report

    async def _find_empty(self, desk: Desk, holders: list[str]) -> None:
        """A replica whose stream is empty twice in a row while the books say otherwise."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for replica in holders:
                pipe.xlen(names.batches(replica))
            lengths = await pipe.execute()
        before = self._clock() - OLD_SECONDS
        for replica, length in zip(holders, lengths, strict=True):
            old = length == 0 and any(
                f.replica == replica and f.released < before for f in desk.flying.values()
            )
            self._empty[replica] = self._empty.get(replica, 0) + 1 if old else 0
            if self._empty[replica] >= 2:
                self._suspects.add(replica)

    # ------------------------------------------------------------ gateways

    async def _gateways(self, desks: Iterable[Desk]) -> list[Report]:
        gateways = sorted(g.decode() for g in await self._redis.smembers(names.GATEWAYS))
        async with self._redis.pipeline(transaction=False) as pipe:
            for gateway in gateways:
                pipe.exists(names.gateway_alive(gateway))
            alive = await pipe.execute()
        await self._sweep()
        reports: list[Report] = []
        for gateway, is_alive in zip(gateways, alive, strict=True):
            if is_alive or not self._trust:
                self._gateway_misses.pop(gateway, None)
                continue
            self._gateway_misses[gateway] = self._gateway_misses.get(gateway, 0) + 1
            if self._gateway_misses[gateway] >= GATEWAY_MISSES and await self._forget(gateway):
                del self._gateway_misses[gateway]
                self._swept[gateway] = SWEEP_ROUNDS
                reports.extend(_gateway_gone(desk, gateway) for desk in desks)
        return reports

    async def _sweep(self) -> None:
        """A replica may still answer a gateway that was just deleted: delete that again."""
        for gateway, rounds in list(self._swept.items()):
            await self._forget(gateway)
            if rounds <= 1:
                del self._swept[gateway]
            else:
                self._swept[gateway] = rounds - 1

    async def _forget(self, gateway: str) -> bool:
        keys = (
            self._lease.fence_key,
            names.gateway_alive(gateway),
            names.replies(gateway),
            names.GATEWAYS,
        )
        (gone,) = await run(self._redis, [Call(FORGET_GATEWAY, keys, (self._lease.token, gateway))])
        if isinstance(gone, Exception):
            raise gone
        if gone and gateway not in self._swept:
            log.warning("gateway %s is gone: its requests are dropped", gateway)
        return bool(gone)


def _gateway_gone(desk: Desk, gateway: str) -> Report:
    def report(now: float) -> None:
        desk.drop_gateway(gateway, now)

    return report
