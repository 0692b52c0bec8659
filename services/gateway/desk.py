"""The gateway's book of requests in flight. It answers for each of them, from the HTTP call to
the last token: replies are entered here, lost requests go out again from here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from services.gateway import errors
from services.gateway.answer import Answer, Choice, Gap
from services.gateway.errors import ApiError
from services.gateway.http import Exchange
from services.gateway.metrics import Metrics
from services.gateway.outbox import Outbox
from shared.messages import Failed, Lost, Message, Output, StepReply

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.25
STUCK_SECONDS = 5.0  # beyond the hard time limit


class Desk:
    """In-flight answers by the ids of their choices. One event loop, no locks."""

    def __init__(
        self,
        outbox: Outbox,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        max_attempts: int,
        timeout: float,
        on_dead_letter: Callable[[Choice, str], None],
    ) -> None:
        self._outbox, self._metrics, self._clock = outbox, metrics, clock
        self._max_attempts, self._timeout = max_attempts, timeout
        self._on_dead_letter = on_dead_letter
        self._choices: dict[str, Choice] = {}
        self._open: dict[str, tuple[Answer, Exchange]] = {}

    # ------------------------------------------------------------ the HTTP side

    def open(self, answer: Answer, exchange: Exchange) -> None:
        """Send an answer's requests on their way."""
        self._outbox.submit(answer.choices)  # first: what it refuses leaves nothing here
        for choice in answer.choices:
            self._choices[choice.id] = choice
        self._open[answer.id] = (answer, exchange)
        answer.task = asyncio.current_task()

    def close(self, answer: Answer) -> None:
        """Nobody waits any more: what still runs is cancelled."""
        del self._open[answer.id]
        for choice in answer.choices:
            if self._choices.pop(choice.id, None) is not None:
                if choice.finish is None:
                    self._outbox.cancel(choice.request)
                self._metrics.ended(choice, answer)
        if answer.watcher is not None:
            answer.watcher.cancel()

    def counts(self) -> dict[tuple[str, str], list[int]]:
        """(model, engine) -> [answering, waiting for the first token]."""
        found: dict[tuple[str, str], list[int]] = {}
        for choice in self._choices.values():
            card = choice.model.card
            pair = found.setdefault((card.name, card.engine), [0, 0])
            if choice.finish is None:
                pair[0 if choice.tokens else 1] += 1
        return found

    def unfinished(self) -> list[Choice]:
        return [c for c in self._choices.values() if c.finish is None]

    def __len__(self) -> int:
        return len(self._open)

    def fail_all(self, error: ApiError) -> None:
        for answer, _ in self._open.values():
            answer.fail(error)

    async def sweep(self) -> None:
        """Watch the client of every answer that takes longer; enforce the hard time limit.

        Quick answers never pay for a watching task.
        """
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = self._clock()
            for answer, exchange in list(self._open.values()):
                if answer.watcher is None:
                    answer.watcher = asyncio.create_task(_watch(answer, exchange))
                elif now - answer.received > self._timeout:
                    answer.fail(errors.timed_out(self._timeout))
                    if now - answer.received > self._timeout + STUCK_SECONDS:
                        _cut(answer)

    # ------------------------------------------------------------ the Redis side

    def receive(self, reply: Message) -> None:
        """Enter one reply. What belongs to no request, or to an earlier attempt, is dropped."""
        if isinstance(reply, StepReply):
            for output in reply.outputs:
                choice = self._choices.get(output.id)
                if choice is not None and choice.attempt == output.attempt:
                    choice.replica = reply.replica
                    self._output(choice, output)
        elif isinstance(reply, Failed):
            choice = self._current(reply.id, reply.attempt)
            if choice is not None and choice.answer is not None:
                choice.answer.fail(errors.from_failed(reply))
        elif isinstance(reply, Lost):
            choice = self._current(reply.id, reply.attempt)
            if choice is not None and reply.preempted:
                log.info("request %s was taken back from %s; it goes on", choice.id, reply.replica)
                self.resubmit(choice)
            elif choice is not None:
                self._lost(choice, reply.replica)

    def _current(self, id: str, attempt: int) -> Choice | None:
        choice = self._choices.get(id)
        return choice if choice is not None and choice.attempt == attempt else None

    def _output(self, choice: Choice, output: Output) -> None:
        if choice.finish is not None:
            return
        answer = choice.answer
        assert answer is not None, "a choice in the book has its answer"
        if output.finish == "cancelled":
            answer.fail(errors.unavailable("the request was cancelled by the server", 1.0))
            return
        try:
            news = choice.take(output, self._clock())
        except Gap:
            log.warning("tokens of request %s were lost; it continues elsewhere", choice.id)
            self.resubmit(choice)
            return
        if choice.stopped_here and output.finish is None:
            self._outbox.cancel(choice.request)
        if news:
            answer.progressed(choice.finish is not None)

    def _lost(self, choice: Choice, replica: str) -> None:
        """Its replica died: again, as often as allowed."""
        choice.lost = (*choice.lost, (self._clock(), replica))
        self._metrics.lost()
        if len(choice.lost) < self._max_attempts:
            log.warning("request %s was lost with replica %s; it goes on", choice.id, replica)
            self.resubmit(choice)
            return
        why = f"its replica died {len(choice.lost)} times, last {replica}"
        self._on_dead_letter(choice, why)
        assert choice.answer is not None
        choice.answer.fail(
            ApiError(
                503,
                f"the request was given up: {why}",
                type="service_unavailable_error",
                code="replica_lost",
                retry=False,
            )
        )

    def resubmit(self, choice: Choice) -> None:
        """Continue with what has arrived; an answer whose end alone was lost is complete."""
        sampling = choice.request.sampling
        reason = None
        if choice.tokens and choice.tokens[-1] in choice.end_tokens:
            reason = "stop" if len(choice.tokens) > sampling.min_tokens else None
        if len(choice.tokens) >= sampling.max_tokens:
            reason = reason or "length"
        if reason is not None:
            choice.end(reason, self._clock())
            assert choice.answer is not None
            choice.answer.progressed(True)
            return
        choice.progress_at = self._clock()
        self._outbox.resubmit(choice.continuation())

    def stale(self, before: float) -> Iterable[Choice]:
        """Unfinished choices of which nothing was heard since ``before`` (Redis seconds)."""
        return [c for c in self.unfinished() if c.progress_at < before]


def _cut(answer: Answer) -> None:
    """Its client reads nothing: the error cannot be written either."""
    if answer.task is not None:
        log.warning("request %s: its client does not read; the connection is cut", answer.id)
        answer.task.cancel()


async def _watch(answer: Answer, exchange: Exchange) -> None:
    """The body has been read: the next thing the connection says is that it is gone."""
    while True:
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            answer.abandon()
            return
