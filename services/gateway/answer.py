"""An answer being made: its choices, their text so far, and who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.catalogue import ServedModel
from services.gateway.errors import ApiError, ClientGone
from services.gateway.text import Detokenizer, StopScanner
from shared.messages import Generate, Output, TokenLogprobs


class Gap(Exception):
    """An output begins beyond what has arrived: tokens between were lost."""


class Choice:
    """One sequence of an answer; exactly one ``Generate`` is in flight for it at a time."""

    __slots__ = (
        "_detokenizer",
        "_fresh",
        "_fresh_from",
        "_pieces",
        "_stops",
        "answer",
        "attempt",
        "cached_tokens",
        "end_tokens",
        "finish",
        "finished_at",
        "first_at",
        "index",
        "logprobs",
        "lost",
        "model",
        "progress_at",
        "replica",
        "request",
        "stamps",
        "stopped_here",
        "tokens",
        "version",
    )

    def __init__(
        self,
        request: Generate,
        model: ServedModel,
        index: int,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        incremental: bool = False,
    ) -> None:
        self.request, self.model, self.index = request, model, index
        self.answer: Answer | None = None
        self.attempt = request.attempt
        self.lost: tuple[tuple[float, str], ...] = ()  # when, and with which replica
        self.replica = ""  # that computes it
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: str | None = None
        self.stopped_here = False  # a stop string was met: the engine must be told
        self.version: str | None = None  # adapter version
        self.cached_tokens = 0
        self.stamps: dict[str, float] = {}
        self.first_at: float | None = None  # Redis seconds, seen from here
        self.finished_at: float | None = None
        self.progress_at = request.arrival
        self.end_tokens = frozenset(request.sampling.stop_token_ids)
        self._stops = StopScanner(stops, include_stop) if stops else None
        self._detokenizer: Detokenizer | None = (
            model.vocabulary.detokenizer() if incremental or stops else None
        )
        self._pieces: list[str] = []
        self._fresh: list[str] = []  # text not yet taken by the stream
        self._fresh_from = 0  # first token not yet taken by the stream

    @property
    def id(self) -> str:
        return self.request.id

    def take(self, output: Output, now: float) -> bool:
        """Add an output; False when it brings nothing new. Raises Gap."""
        have = len(self.tokens)
        if output.offset > have:
            raise Gap
        skip = have - output.offset
        fresh = output.tokens[skip:] if skip else output.tokens
        if not fresh and output.finish is None:
            return False
        self.progress_at = now
        if fresh:
            if self.first_at is None:
                self.first_at = now
            if output.logprobs:
                self.logprobs.extend(output.logprobs[skip:])
            self._add(fresh, output.finish)
        if output.adapter_version is not None:
            self.version = output.adapter_version
        if output.finish is not None and self.finish is None:
            self.stamps, self.cached_tokens = output.stamps, output.cached_tokens
            self.end(output.finish, now)
        elif self.finish is not None:
            self.finished_at = now
        return True

    def end(self, reason: str, now: float) -> None:
        """The last token is here; an open character and a held tail come out."""
        self.finish, self.finished_at = reason, now
        if self._detokenizer is not None:
            self._show(self._detokenizer.flush())
            if self._stops is not None and self.finish is not None and not self.stopped_here:
                self._emit(self._stops.flush())

    def text(self) -> str:
        """The answer so far."""
        if self._detokenizer is not None:
            return "".join(self._pieces)
        return self.model.vocabulary.decode(self._visible(self.tokens, self.finish))

    def fresh(self) -> tuple[str, int, int]:
        """Text since the last call, and the range of tokens since then that goes with it."""
        text, start = "".join(self._fresh), self._fresh_from
        self._fresh.clear()
        self._fresh_from = len(self.tokens)
        return text, start, self._fresh_from

    @property
    def visible_tokens(self) -> int:
        """Tokens without the stop token that ended the answer."""
        return len(self._visible(self.tokens, self.finish))

    @property
    def has_fresh(self) -> bool:
        return bool(self._fresh)

    def _add(self, tokens: tuple[int, ...], finish: str | None) -> None:
        if self._detokenizer is None:
            self.tokens.extend(tokens)
            return
        if self._stops is None:
            self.tokens.extend(tokens)
            self._emit(self._detokenizer.push(self._visible(tokens, finish)))
            return
        visible = len(self._visible(tokens, finish))
        for i, token in enumerate(tokens):  # so that nothing after the stop string counts
            self.tokens.append(token)
            if i < visible:
                self._show(self._detokenizer.push((token,)))
            if self.stopped_here:
                return

    def _visible(self, tokens: Sequence[int], finish: str | None) -> Sequence[int]:
        """Without the stop token that ended the answer."""
        if finish == "stop" and not self.stopped_here and tokens and tokens[-1] in self.end_tokens:
            return tokens[:-1]
        return tokens

    def _show(self, piece: str) -> None:
        """Through the stop strings; before ``min_tokens`` they do not count."""
        if self.stopped_here:
            return
        if self._stops is None:
            self._emit(piece)
            return
        if len(self.tokens) < self.request.sampling.min_tokens:
            self._emit(piece)
            return
        shown, met = self._stops.push(piece)
        self._emit(shown)
        if met:
            self.stopped_here = True
            self.finish = "stop"

    def _emit(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._fresh.append(piece)

    def continuation(self) -> Generate:
        """The request again, for another replica: what has arrived is not computed anew."""
        self.attempt += 1
        return msgspec.structs.replace(
            self.request,
            attempt=self.attempt,
            generated=tuple(self.tokens),
            adapter_version=self.version if self.tokens else self.request.adapter_version,
        )


class Answer:
    """All choices of one HTTP request and the task that waits for them."""

    __slots__ = (
        "_waiter",
        "choices",
        "error",
        "gone",
        "id",
        "open",
        "prompt_tokens",
        "received",
        "stream",
        "task",
        "watcher",
    )

    def __init__(
        self, id: str, choices: list[Choice], prompt_tokens: int, received: float, stream: bool
    ) -> None:
        self.id, self.choices, self.stream = id, choices, stream
        self.prompt_tokens = prompt_tokens  # of all prompts, each counted once
        self.received = received  # Redis seconds
        self.open = len(choices)
        self.error: ApiError | None = None
        self.gone = False
        self.watcher: asyncio.Task[None] | None = None
        self.task: asyncio.Task[Any] | None = None  # that answers
        self._waiter: asyncio.Future[bool] | None = None
        for choice in choices:
            choice.answer = self

    @property
    def done(self) -> bool:
        return self.open == 0

    def progressed(self, finished: bool) -> None:
        """A choice has new tokens; wakes the task when there is something for it to do."""
        if finished:
            self.open -= 1
        if self.stream or self.open == 0:
            self._wake()

    def fail(self, error: ApiError) -> None:
        """The first error is the one that is told."""
        if self.error is None:
            self.error = error
        self._wake()

    def abandon(self) -> None:
        """The client is gone."""
        self.gone = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def check(self) -> None:
        """Raises ApiError or ClientGone when the answer will not be completed."""
        if self.gone:
            raise ClientGone
        if self.error is not None:
            raise self.error

    async def changed(self, seconds: float | None = None) -> bool:
        """Until ``progressed``, ``fail`` or ``abandon`` is called next; False when ``seconds``
        pass before that."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        timer = None if seconds is None else loop.call_later(seconds, _silent, waiter)
        try:
            return await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    async def complete(self) -> None:
        """Until every choice has ended. Raises ApiError, ClientGone."""
        self.check()
        while not self.done:
            await self.changed()
            self.check()

    async def begun(self, seconds: float | None = None) -> bool:
        """Until the first text or the end; False when nothing happened for ``seconds``.

        Raises ApiError, ClientGone.
        """
        self.check()
        while not self.done and not any(c.has_fresh for c in self.choices):
            if not await self.changed(seconds):
                return False
            self.check()
        return True

    def usage(self) -> dict[str, object]:
        completion = sum(len(c.tokens) for c in self.choices)
        cached = sum(c.cached_tokens for c in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": min(cached, self.prompt_tokens)},
        }


def _silent(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
