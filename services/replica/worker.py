"""The serving loop of one replica: take in what arrived, one engine step, hand out the result.

One task calls the engine; reading and publishing run beside it, so Redis never waits for the
engine nor the engine for Redis. What the loop answers for is in ``Books``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from services.replica.adapter_loads import AdapterLoads
from services.replica.books import Books, Member
from services.replica.control_block import ControlBlock
from services.replica.engines.base import Engine, Rejected, StepReport
from services.replica.intake import Arrived, poisoned
from services.replica.link import Publisher, Turn
from services.replica.meters import Meters
from services.replica.samples import Sampler
from services.replica.slack import slack
from services.replica.slots import Slots
from shared.clock import Now
from shared.lifetime import Stamp
from shared.messages import (
    Batch,
    Cancel,
    Configure,
    DecodeError,
    DeleteData,
    Drain,
    Failed,
    Finished,
    Generate,
    LoadAdapter,
    StoreData,
    UnloadAdapter,
    decode,
)

log = logging.getLogger(__name__)

IDLE_TURN = 0.25  # seconds between turns when there is nothing to do
MOST_TAKEN = 128  # entries looked at between two steps
REMEMBERED = 10_000  # cancelled ids kept for requests that arrive after their cancellation
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
    ) -> None:
        self.replica, self.engine, self.publisher = replica, engine, publisher
        self.block, self.loads, self.meters = block, loads, meters
        self._now, self._slots, self._threads = now, slots, threads
        self.books = Books()
        self.sampler = Sampler(replica, engine.card.name, emulated=engine.card.emulated)
        self.incarnation = ""
        self.status = engine.status()  # as of the last turn
        self._next_life: tuple[str, Callable[[], None]] | None = None
        self.drain_wanted: str | None = None  # why a Drain command asked for it
        self.draining = False
        self._inbox: deque[Arrived] = deque()
        self._again: dict[str, Member] = {}  # later attempts, waiting for the old one to leave
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._flush = False  # the engine has a cancellation to report
        self._gone: set[str] = set()  # gateways whose requests are to be cancelled
        self._wake = asyncio.Event()
        self._turn = Turn()
        self._busy_b = 0.0  # sum of b times seconds, for the mean over a tick

    # ------------------------------------------------------------ called by others

    def arrive(self, arrived: Arrived) -> None:
        """An entry was read from a stream; it is looked at before the next step."""
        self._inbox.append(arrived)
        self._wake.set()

    def forget(self, gateway: str) -> None:
        """Cancel all requests of a gateway that is gone, before the next step."""
        self._gone.add(gateway)
        self._wake.set()

    @property
    def empty(self) -> bool:
        """Whether nothing is left to answer (what Redis has not delivered yet aside)."""
        return self.books.empty and not self._inbox and not self._again

    def begin(self, incarnation: str, begun: Callable[[], None]) -> None:
        """Start, or start anew, as ``incarnation`` at the next turn; ``begun`` is called then.

        Everything of the incarnation before is dropped: it was declared dead, and its requests
        have been given back to their gateways.
        """
        self._next_life = (incarnation, begun)
        self._inbox.clear()
        self._wake.set()

    def _begin(self, incarnation: str, begun: Callable[[], None]) -> None:
        self._next_life = None
        for request_id in list(self.books.members):
            self._flush |= self.engine.cancel(request_id)
        self.books.clear()
        self._again.clear()
        self.publisher.drop()
        self._turn = Turn()
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
            await self._take_in()
            if not (self.engine.has_work() or self._flush):
                self._publish(self._now())
                await self._idle()
                continue
            await self._room()
            report = await self._step()
            self._hand_out(report)

    def _mark_turn(self) -> None:
        self.block.progress += 1
        self.block.progress_time = time.monotonic()

    async def _idle(self) -> None:
        self.block.slack = slack((), 0.0, 0.0)
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
        try:
            if self._slots is not None:
                lease = self._slots.try_acquire(self._threads)
                if lease is None:
                    lease = await asyncio.to_thread(self._slots.acquire, self._threads)
                self.engine.use_threads(lease.count)
                self.block.step_started = time.monotonic()
            return await self.engine.step()
        finally:
            if lease is not None:
                lease.release()
            self.block.step_started = 0.0

    def _hand_out(self, report: StepReport) -> None:
        now = self._now()
        self._flush = False
        for gateway, output in report.outputs:
            member = self.books.members.get(output.id)
            if member is None or member.request.attempt != output.attempt:
                continue  # of an incarnation that is no more
            member.note(output, now)
            if output.finish is not None:
                output.stamps.setdefault(Stamp.QUEUED, member.queued)
                output.stamps.setdefault(Stamp.RELEASED, member.released)
                output.stamps.setdefault(Stamp.RECEIVED, member.request.arrival)
                self.meters.answered(self.replica, member.request, output)
            self._turn.outputs.append((gateway, output))
        for finished in report.finished:
            self._leave(finished)
        status = self.status = self.engine.status()
        B = self.block.micro_samples if self.block.micro_started else 0
        self.sampler.add(report, status, B, now)
        self.meters.stepped(self.replica, report)
        self._account(report, B, now)
        self._publish(now)

    def _account(self, report: StepReport, B: int, now: float) -> None:
        block = self.block
        if report.b:
            block.busy_seconds += report.seconds
            block.steps += 1
            self._busy_b += report.b * report.seconds
            if not B or not block.step_estimate:
                old = block.step_estimate or report.seconds
                block.step_estimate = old + SMOOTHING * (report.seconds - old)
        block.running, block.waiting = self.status.running, self.status.waiting
        if block.B > 0:  # else training rests anyway, and nobody asks
            block.slack = slack(self.books.members.values(), now, block.step_estimate)

    def mean_b(self, seconds: float) -> float:
        """Requests decoding together, mean over the last ``seconds``; starts a new interval."""
        mean = self._busy_b / seconds if seconds > 0 else 0.0
        self._busy_b = 0.0
        return mean

    def _publish(self, now: float) -> None:
        self._turn.samples.extend(("step", sample) for sample in self.sampler.take(now))
        turn = self._turn
        if any(getattr(turn, field) for field in turn.__struct_fields__):
            self.publisher.put(turn)
            self._turn = Turn()

    # ------------------------------------------------------------ requests

    async def _take_in(self) -> None:
        if self._gone:
            for member in list(self.books.members.values()):
                if member.request.gateway in self._gone:
                    self._cancel(member.request.id)
            self._gone.clear()
        for member in [m for i, m in self._again.items() if i not in self.books.members]:
            del self._again[member.request.id]
            await self._submit(member)
        for _ in range(min(len(self._inbox), MOST_TAKEN)):
            arrived = self._inbox.popleft()
            try:
                if arrived.is_batch:
                    await self._batch(arrived)
                else:
                    await self._command(arrived)
            except DecodeError as e:
                log.error("%s: entry %r is no message: %s", self.replica, arrived.entry, e.reason)
                self._turn.letters.append(arrived.letter(e.reason, self.replica))
                (self._turn.done if arrived.is_batch else self._turn.obeyed).append(arrived.entry)

    async def _batch(self, arrived: Arrived) -> None:
        batch = decode(arrived.body, Batch)
        if not batch.requests:
            raise DecodeError("a batch without requests", arrived.body)
        self.books.expect(arrived.entry, len(batch.requests))
        for position, raw in enumerate(batch.requests):
            queued = batch.queued[position] if position < len(batch.queued) else batch.released
            try:
                request = decode(raw, Generate)
            except DecodeError as e:
                self._poisoned(arrived, raw, e.reason)
                continue
            await self._accept(Member(request, arrived.entry, queued, batch.released))

    def _poisoned(self, arrived: Arrived, raw: bytes, reason: str) -> None:
        """A member that does not decode: dead letter; its gateway hears of it if it is named."""
        log.error(
            "%s: a request of entry %r is no message: %s", self.replica, arrived.entry, reason
        )
        self._turn.letters.append(arrived.letter(reason, self.replica, body=raw))
        if (told := poisoned(raw, reason)) is not None:
            self._turn.failures.append(told)
        self._settle(arrived.entry)

    async def _accept(self, member: Member) -> None:
        request_id = member.request.id
        running = self.books.members.get(request_id)
        if self._cancelled.pop(request_id, 0) is None:
            self._settle(member.entry)
        elif running is None:
            await self._submit(member)
        elif member.request.attempt > running.request.attempt:
            self._flush |= self.engine.cancel(request_id)
            if (older := self._again.pop(request_id, None)) is not None:
                self._settle(older.entry)
            self._again[request_id] = member
        else:
            self._settle(member.entry)  # the same attempt twice: it is being answered

    async def _submit(self, member: Member) -> None:
        request = member.request
        try:
            self._check(request)
            await self.loads.ready(request)
            self.engine.submit(request)
        except Rejected as e:
            self._refuse(member, e)
            return
        self.books.add(member)

    def _check(self, request: Generate) -> None:
        card = self.engine.card
        if request.model != card.name:
            raise Rejected(
                f"model {request.model!r} was sent to {self.replica}, which serves {card.name!r}",
                status=404,
                code="model_not_found",
                param="model",
            )
        tokens = request.prompt + request.generated
        if not request.prompt or not 0 <= min(tokens) <= max(tokens) < card.vocabulary:
            raise Rejected(
                f"prompt: token ids from 0 to {card.vocabulary - 1} expected, at least one",
                param="prompt",
            )

    def _refuse(self, member: Member, error: Rejected) -> None:
        request = member.request
        failed = Failed(
            id=request.id,
            attempt=request.attempt,
            status=error.status,
            code=error.code,
            message=str(error),
            type="invalid_request_error" if error.status < 500 else "server_error",
            param=error.param,
        )
        self._turn.failures.append((request.gateway, failed))
        self._settle(member.entry)
        gone = Finished(request.id, request.attempt, len(request.prompt), 0, "failed")
        report = StepReport(finished=(gone,))
        self.sampler.add(report, self.engine.status(), 0, self._now())

    def _leave(self, finished: Finished) -> None:
        member = self.books.members.get(finished.id)
        if member is not None and member.request.attempt == finished.attempt:
            self.books.remove(finished.id)
            self._settle(member.entry)
            self.meters.left(self.replica, finished)

    def _settle(self, entry: bytes) -> None:
        if self.books.settle(entry):
            self._turn.done.append(entry)

    # ------------------------------------------------------------ commands

    async def _command(self, arrived: Arrived) -> None:
        command = arrived.command()
        match command:
            case Cancel():
                self._cancel(command.id)
            case Configure():
                self._configure(command)
            case LoadAdapter() | UnloadAdapter():
                self._turn.events.append(await self.loads.obey(command))
            case StoreData() | DeleteData():
                self._turn.events.append(await self.loads.obey_data(command))
            case Drain():
                self.drain_wanted = command.reason or "asked for"
            case _:
                raise DecodeError(f"{type(command).__name__} is no command", arrived.body)
        self._turn.obeyed.append(arrived.entry)

    def _cancel(self, request_id: str) -> None:
        later = self._again.pop(request_id, None)
        if later is not None:
            self._settle(later.entry)
        if request_id in self.books.members:
            self._flush |= self.engine.cancel(request_id)
        elif later is None:
            self._cancelled[request_id] = None
            if len(self._cancelled) > REMEMBERED:
                self._cancelled.popitem(last=False)

    def _configure(self, command: Configure) -> None:
        if command.b is not None:
            b = max(1, min(command.b, self.engine.b_max))
            self.engine.configure(b=b)
            self.block.b = b
        if command.B is not None:
            self.block.B = max(0, command.B)
