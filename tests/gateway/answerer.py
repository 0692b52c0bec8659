"""A stand-in for dispatcher and replicas: reads a model's request stream, writes replies.

It holds to the contracts (one stream holds a request at any time, offsets, attempts, stamps)
and does what a test tells it: which tokens, how fast, when to lose or fail a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from shared import names
from shared.messages import (
    BODY,
    Cancel,
    Generate,
    Message,
    Output,
    StepReply,
    TokenLogprobs,
    TopLogprob,
    decode,
    encode,
)
from shared.records import ModelCard, ReplicaRecord
from shared.redis_client import TRANSIENT, ensure_group, patiently

Script = Callable[[Generate], list[int]]


def says(text: str) -> Script:
    """Answer with this text's bytes as the tiny model's tokens, then its end token."""
    return lambda _: [*tokens_of(text), 2]


def tokens_of(text: str | bytes) -> list[int]:
    """Tokens of the tiny byte-level model (ids 0-2 are special)."""
    from tokenizers import pre_tokenizers

    from services.gateway.text import _BYTE_OF

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    index = {_BYTE_OF[c]: i + 3 for i, c in enumerate(alphabet)}
    raw = text.encode() if isinstance(text, str) else text
    return [index[b] for b in raw]


class Answerer:
    """Answers requests of one model as a dispatcher and one replica would."""

    def __init__(self, redis: Redis, model: str, script: Script) -> None:
        self.redis, self.model, self.script = redis, model, script
        self.seen: list[Generate] = []
        self.cancelled: list[str] = []
        self.step_seconds = 0.0
        self.per_step = 1  # tokens a step
        self.version: str | None = None
        self.hold = asyncio.Event()  # clear: requests stay in the stream
        self.hold.set()
        self.reply: Callable[[Generate], list[Message] | None] = lambda _: None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        stream = names.requests(self.model)
        while True:
            try:
                await self.hold.wait()
                await ensure_group(self.redis, stream, names.GROUP_DISPATCHER)
                found = await self.redis.xread({stream: "0"}, count=100, block=200)
                for id, fields in found[0][1] if found else []:
                    if not self.hold.is_set():
                        break
                    request = decode(fields[BODY], Generate)
                    self.seen.append(request)
                    pipe = self.redis.pipeline(transaction=True)
                    pipe.xdel(stream, id)
                    await pipe.execute()
                    self._start(request)
            except TRANSIENT:
                await asyncio.sleep(0.05)

    async def listen(self) -> None:
        last = "0"
        stream = names.dispatcher_control(self.model)
        while True:
            try:
                found = await self.redis.xread({stream: last}, block=200)
            except TRANSIENT:
                await asyncio.sleep(0.05)
                continue
            for id, fields in found[0][1] if found else []:
                last = id
                self.cancelled.append(decode(fields[BODY], Cancel).id)

    def _start(self, request: Generate) -> None:
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Generate) -> None:
        special = self.reply(request)
        if special is not None:
            for message in special:
                await self.send(request.gateway, message)
            return
        tokens = self.script(request)[: request.sampling.max_tokens]
        ended = tokens[-1:] and tokens[-1] in request.sampling.stop_token_ids
        at = len(request.generated)
        while at < len(tokens):
            if request.id in self.cancelled:
                return
            step = tokens[at : at + self.per_step]
            finish = None
            if at + len(step) == len(tokens):
                finish = "stop" if ended else "length"
            await self.send(request.gateway, self.output(request, at, step, finish))
            at += len(step)
            if self.step_seconds:
                await asyncio.sleep(self.step_seconds)

    def output(
        self, request: Generate, offset: int, tokens: list[int], finish: str | None = None
    ) -> StepReply:
        logprobs: tuple[TokenLogprobs, ...] = ()
        if (k := request.sampling.logprobs) is not None:
            top = tuple(TopLogprob(60 + i, -1.0 - i) for i in range(k))
            logprobs = tuple(TokenLogprobs(-0.5, top) for _ in tokens)
        return StepReply(
            replica="r0",
            outputs=(
                Output(
                    id=request.id,
                    attempt=request.attempt,
                    offset=offset,
                    tokens=tuple(tokens),
                    logprobs=logprobs,
                    finish=finish,
                    adapter_version=self.version,
                ),
            ),
        )

    async def send(self, gateway: str, message: Message) -> None:
        kind = str(message.__struct_config__.tag)
        fields = {"kind": kind, BODY: encode(message)}
        await patiently(lambda: self.redis.xadd(names.replies(gateway), fields), "the answerer")


async def register(
    redis: Redis, name: str, folder: Path, *, engine: str = "torch", context: int = 512
) -> None:
    """A model's card and one live replica of it."""
    card = ModelCard(
        name=name, path=str(folder), context=context, vocabulary=259, engine=engine, created=1.0
    )
    await redis.hset(names.model(name), mapping=card.to_hash())
    await redis.sadd(names.MODELS, name)
    record = ReplicaRecord(id=f"{name}-r0", model=name, engine=engine, state="serving")
    await redis.hset(names.replica(record.id), mapping=record.to_hash())
    await redis.sadd(names.REPLICAS, record.id)
    await redis.set(names.replica_alive(record.id), "1")


@asynccontextmanager
async def answering(redis: Redis, model: str, script: Script) -> AsyncIterator[Answerer]:
    """An answerer at work."""
    answerer = Answerer(redis, model, script)
    tasks = [asyncio.create_task(answerer.run()), asyncio.create_task(answerer.listen())]
    try:
        yield answerer
    finally:
        for task in [*tasks, *answerer._tasks]:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    """Wait until ``condition()`` is true (it may be a coroutine function)."""
    end = asyncio.get_running_loop().time() + seconds
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        assert asyncio.get_running_loop().time() < end, f"{what}: not within {seconds} s"
        await asyncio.sleep(0.02)
