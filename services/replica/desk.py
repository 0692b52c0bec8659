"""The desk of a replica: what it takes in, refuses, cancels and obeys. Between steps only.

Reads entries of the batch and control streams in their order, keeps the books of what the
replica answers for, and collects what is to be published about it in a ``Turn``.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable

from services.replica.adapter_loads import AdapterLoads
from services.replica.books import Books, Member
from services.replica.control_block import ControlBlock
from services.replica.engines.base import Engine, Rejected
from services.replica.intake import Arrived, poisoned
from services.replica.link import Turn
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

MOST_TAKEN = 128  # entries looked at between two steps
REMEMBERED = 10_000  # cancelled ids kept for requests that arrive after their cancellation


class Desk:
    """Requests and commands of one replica. ``refused`` hears of every request turned away."""

    def __init__(
        self,
        replica: str,
        engine: Engine,
        loads: AdapterLoads,
        block: ControlBlock,
        refused: Callable[[Finished], None],
    ) -> None:
        self.replica, self.engine, self.loads, self.block = replica, engine, loads, block
        self._refused = refused
        self.books = Books()
        self.turn = Turn()  # to be published; taken away by the loop
        self.flush = False  # the engine has a cancellation to report
        self.gone: set[str] = set()  # gateways whose requests are to be cancelled
        self.drain_wanted: str | None = None  # why a Drain command asked for it
        self._again: dict[str, Member] = {}  # later attempts, waiting for the old one to leave
        self._cancelled: OrderedDict[str, None] = OrderedDict()

    @property
    def empty(self) -> bool:
        """Whether nothing taken in is left to answer."""
        return self.books.empty and not self._again

    def clear(self) -> None:
        """Drop everything: it belongs to an incarnation that was declared dead."""
        for request_id in list(self.books.members):
            self.flush |= self.engine.cancel(request_id)
        self.books.clear()
        self._again.clear()
        self.turn = Turn()

    # ------------------------------------------------------------ requests

    async def take_in(self, inbox: deque[Arrived]) -> None:
        """Look at what was read, in its order; at most ``MOST_TAKEN`` entries."""
        if self.gone:
            for member in list(self.books.members.values()):
                if member.request.gateway in self.gone:
                    self._cancel(member.request.id)
            self.gone.clear()
        for member in [m for i, m in self._again.items() if i not in self.books.members]:
            del self._again[member.request.id]
            await self._submit(member)
        for _ in range(min(len(inbox), MOST_TAKEN)):
            arrived = inbox.popleft()
            try:
                if arrived.is_batch:
                    await self._batch(arrived)
                else:
                    await self._command(arrived)
            except DecodeError as e:
                log.error("%s: entry %r is no message: %s", self.replica, arrived.entry, e.reason)
                self.turn.letters.append(arrived.letter(e.reason, self.replica))
                (self.turn.done if arrived.is_batch else self.turn.obeyed).append(arrived.entry)

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
        self.turn.letters.append(arrived.letter(reason, self.replica, body=raw))
        if (told := poisoned(raw, reason)) is not None:
            self.turn.failures.append(told)
        self._settle(arrived.entry)

    async def _accept(self, member: Member) -> None:
        request_id = member.request.id
        running = self.books.members.get(request_id)
        if self._cancelled.pop(request_id, 0) is None:
            self._settle(member.entry)
        elif running is None:
            await self._submit(member)
        elif member.request.attempt > running.request.attempt:
            self.flush |= self.engine.cancel(request_id)
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
        self.turn.failures.append((request.gateway, failed))
        self._settle(member.entry)
        self._refused(Finished(request.id, request.attempt, len(request.prompt), 0, "failed"))

    def leave(self, finished: Finished) -> bool:
        """A request has left the engine; False if it was none of ours any more."""
        member = self.books.members.get(finished.id)
        if member is None or member.request.attempt != finished.attempt:
            return False
        self.books.remove(finished.id)
        self._settle(member.entry)
        return True

    def _settle(self, entry: bytes) -> None:
        if self.books.settle(entry):
            self.turn.done.append(entry)

    # ------------------------------------------------------------ commands

    async def _command(self, arrived: Arrived) -> None:
        command = arrived.command()
        match command:
            case Cancel():
                self._cancel(command.id)
            case Configure():
                self._configure(command)
            case LoadAdapter() | UnloadAdapter():
                self.turn.events.append(await self.loads.obey(command))
            case StoreData() | DeleteData():
                self.turn.events.append(await self.loads.obey_data(command))
            case Drain():
                self.drain_wanted = command.reason or "asked for"
            case _:
                raise DecodeError(f"{type(command).__name__} is no command", arrived.body)
        self.turn.obeyed.append(arrived.entry)

    def _cancel(self, request_id: str) -> None:
        later = self._again.pop(request_id, None)
        if later is not None:
            self._settle(later.entry)
        if request_id in self.books.members:
            self.flush |= self.engine.cancel(request_id)
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
