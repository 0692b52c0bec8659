"""The serving loop of one replica: take in what arrived, one engine step, hand out the result.

One task calls the engine; reading and publishing run beside it, so Redis never waits for the
engine nor the engine for Redis. What the replica answers for is kept by its ``Desk``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from services.replica.adapter_loads import AdapterLoads
from services.replica.control_block import ControlBlock
from services.replica.desk import Desk
from services.replica.engines.base import Engine, StepReport
from services.replica.intake import Arrived
from services.replica.link import Publisher, Turn
from services.replica.meters import Meters
from services.replica.samples import Sampler
from services.replica.slack import slack
from services.replica.slots import Slots
from services.replica.solo_pace import SoloPace
from shared.clock import Now
from shared.lifetime import Stamp
from shared.messages import Finished

log = logging.getLogger(__name__)

IDLE_TURN = 0.25  # seconds between turns when there is nothing to do
SMOOTHING = 0.2  # weight of a new step in the estimate of a step's duration


class ServingLoop:
    """One replica's requests, from its batch stream to its replies."""

    def __init__(
        self,
        replica: str,
        engine: Engine,
        publisher: Publisher,
        loads: AdapterLoads,
        block: ControlBlock,
        now: Now,
        *,
        meters: Meters,
        slots: Slots | None = None,
        threads: int = 1,
        pace: SoloPace | None = None,
    ) -> None:
        """``pace``: for a replica that trains beside serving."""
        self.replica, self.engine, self.publisher = replica, engine, publisher
        self.block, self.loads, self.meters = block, loads, meters
        self._now, self._slots, self._threads = now, slots, threads
        self.desk = Desk(replica, engine, loads, block, self._refused)
        self.sampler = Sampler(replica, engine.card.name, emulated=engine.card.emulated)
        self.incarnation = ""
        self.status = engine.status()  # as of the last turn
        self._next_life: tuple[str, Callable[[], None]] | None = None
        self.draining = False
        self._inbox: deque[Arrived] = deque()
        self._wake = asyncio.Event()
        self._busy_b = 0.0  # sum of b times seconds, for the mean over a tick
        self._pace = pace
        self._turn_began: float | None = None  # CLOCK_MONOTONIC; None = the engine rested
        self._disturbed = False  # a micro-step ran beside when the step began

    # ------------------------------------------------------------ called by others

    def arrive(self, arrived: Arrived) -> None:
        """An entry was read from a stream; it is looked at before the next step."""
        self._inbox.append(arrived)
        self._wake.set()

    def forget(self, gateway: str) -> None:
        """Cancel all requests of a gateway that is gone, before the next step."""
        self.desk.gone.add(gateway)
        self._wake.set()

    @property
    def empty(self) -> bool:
        """Whether nothing is left to answer (what Redis has not delivered yet aside)."""
        return self.desk.empty and not self._inbox

    def begin(self, incarnation: str, begun: Callable[[], None]) -> None:
        """Start, or start anew, as ``incarnation`` at the next turn; ``begun`` is called then.

        Everything of the incarnation before is dropped: it was declared dead, and its requests
        have been given back to their gateways.
        """
        self._next_life = (incarnation, begun)
        # Its batches have been given back; commands still hold.
        self._inbox = deque(arrived for arrived in self._inbox if not arrived.is_batch)
        self._wake.set()

    def _begin(self, incarnation: str, begun: Callable[[], None]) -> None:
        self._next_life = None
        self.desk.clear()
        self.publisher.drop()
        self.incarnation = incarnation
        self.sampler.restart(incarnation)
        begun()

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            self._mark_turn()
            if self._next_life is not None:
                self._begin(*self._next_life)
            self.loads.take_published()
            await self.desk.take_in(self._inbox)
            if not (self.engine.has_work() or self.desk.flush):
                self._publish(self._now())
                await self._idle()
                continue
            await self._room()
            report = await self._step()
            self._hand_out(report)

    def _mark_turn(self) -> None:
        self.block.progress_time = time.monotonic()

    async def _idle(self) -> None:
        self.block.slack = slack((), 0.0, 0.0)
        self._turn_began = None
        self.status = self.engine.status()
        if self._inbox or self._next_life is not None:
            return
        self._wake.clear()
        try:
            async with asyncio.timeout(IDLE_TURN):
                await self._wake.wait()
        except TimeoutError:
            pass  # an idle turn, so that progress is seen

    async def _room(self) -> None:
        """Hold computing back while Redis is away and much is unpublished."""
        while True:
            try:
                async with asyncio.timeout(IDLE_TURN):
                    await self.publisher.room()
                    return
            except TimeoutError:
                self._mark_turn()

    async def _step(self) -> StepReport:
        lease = None
        self.block.step_started = time.monotonic()
        self._turn_began = self._turn_began or self.block.step_started
        try:
            if self._slots is not None:
                lease = self._slots.try_acquire(self._threads)
                if lease is None:
                    lease = await asyncio.to_thread(self._slots.acquire, self._threads)
                self.engine.use_threads(lease.count)
                self.block.step_started = time.monotonic()
            self._disturbed = bool(self.block.micro_started)
            return await self.engine.step()
        finally:
            if lease is not None:
                held = time.monotonic() - self.block.step_started
                self.block.slot_seconds += lease.count * held
                lease.release()
            self.block.step_started = 0.0

    def _hand_out(self, report: StepReport) -> None:
        now = self._now()
        self._learn(report)
        self.desk.flush = False
        for gateway, output in report.outputs:
            member = self.desk.books.members.get(output.id)
            if member is None or member.request.attempt != output.attempt:
                continue  # of an incarnation that is no more
            member.note(output, now)
            if self._pace is not None:
                member.mark = member.mark or self._pace.mark()
            if output.finish is not None:
                if self._pace is not None and member.mark is not None:
                    self._pace.finished(member.mark)
                output.stamps.setdefault(Stamp.QUEUED, member.queued)
                output.stamps.setdefault(Stamp.RELEASED, member.released)
                output.stamps.setdefault(Stamp.RECEIVED, member.request.arrival)
                self.meters.answered(self.replica, member.request, output)
            self.desk.turn.outputs.append((gateway, output))
        for finished in report.finished:
            if self.desk.leave(finished):
                self.meters.left(self.replica, finished)
        status = self.status = self.engine.status()
        B = self.block.micro_samples if self.block.micro_started else 0
        self.sampler.add(report, status, B, now)
        self.meters.stepped(self.replica, report)
        self._account(report, B, now)
        self._publish(now)

    def _refused(self, finished: Finished) -> None:
        """The dispatcher learns of free credit from samples, so a refusal is in one too."""
        self.sampler.add(StepReport(finished=(finished,)), self.engine.status(), 0, self._now())

    def _account(self, report: StepReport, B: int, now: float) -> None:
        block = self.block
        if report.b:
            block.busy_seconds += report.seconds
            block.steps += 1
            self._busy_b += report.b * report.seconds
            undisturbed = not (B or self._disturbed or report.prefill_tokens)
            if undisturbed or not block.step_estimate:
                old = block.step_estimate or report.seconds
                block.step_estimate = old + SMOOTHING * (report.seconds - old)
        block.running, block.waiting = self.status.running, self.status.waiting
        if block.B > 0 or self._pace is not None:  # else nobody asks
            members = self.desk.books.members.values()
            solo = self._pace
            step = max(block.step_estimate, solo.step if solo is not None else 0.0)
            block.slack = slack(members, now, step, solo.limit if solo is not None else None)

    def _learn(self, report: StepReport) -> None:
        """Let the pace see the turn that has just ended, from the end of the one before."""
        ended = time.monotonic()
        if self._pace is not None and report.b and self._turn_began is not None:
            alone = not (self._disturbed or self.block.micro_started)
            self._pace.turn(
                ended - self._turn_began, report.decode_tokens, report.prefill_tokens, alone=alone
            )
        self._turn_began = ended

    def mean_b(self, seconds: float) -> float:
        """Requests decoding together, mean over the last ``seconds``; starts a new interval."""
        mean = self._busy_b / seconds if seconds > 0 else 0.0
        self._busy_b = 0.0
        return mean

    def _publish(self, now: float) -> None:
        turn = self.desk.turn
        turn.samples.extend(("step", sample) for sample in self.sampler.take(now))
        if any(getattr(turn, field) for field in turn.__struct_fields__):
            self.publisher.put(turn)
            self.desk.turn = Turn()
