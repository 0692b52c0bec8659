"""The dispatcher's neighbours as scripts: a gateway and a replica that speak through Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from redis.asyncio import Redis

from services.dispatcher.service import Dispatcher
from services.dispatcher.settings import DispatcherSettings
from shared import names
from shared.entries import request_values
from shared.messages import (
    BODY,
    Batch,
    Cancel,
    Finished,
    Generate,
    Sampling,
    StepSample,
    decode,
    decode_any,
    encode,
)
from shared.records import ModelCard, ReplicaRecord
from shared.redis_client import ensure_group
from shared.replica_state import State, move
from shared.slo import Slo

MODEL = "tiny"


async def eventually(
    condition: Callable[[], Awaitable[Any]], what: str, seconds: float = 60.0
) -> Any:
    """Poll until the condition holds; its value. Fails loudly after the deadline."""
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        value = await condition()
        if value:
            return value
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


class ScriptedGateway:
    """Sends requests and reads its reply stream."""

    def __init__(self, redis: Redis, name: str = "g0", model: str = MODEL) -> None:
        self.redis, self.name, self.model = redis, name, model

    async def start(self) -> None:
        await self.redis.sadd(names.GATEWAYS, self.name)
        await self.redis.set(names.gateway_alive(self.name), "1")

    def generate(self, request_id: str, **changes: Any) -> Generate:
        values: dict[str, Any] = {
            "id": request_id,
            "gateway": self.name,
            "model": self.model,
            "prompt": (1, 2, 3),
            "sampling": Sampling(max_tokens=4),
            "slo": Slo(),
            "arrival": 1.0,
        }
        return Generate(**(values | changes))

    async def send(self, request_id: str, **changes: Any) -> None:
        request = self.generate(request_id, **changes)
        await self.redis.execute_command(
            "XADD", names.requests(self.model), "*", *request_values(request)
        )

    async def cancel(self, request_id: str) -> None:
        body = encode(Cancel(id=request_id))
        await self.redis.xadd(names.dispatcher_control(self.model), {BODY: body})

    async def replies(self) -> list[Any]:
        entries = await self.redis.xrange(names.replies(self.name))
        return [decode_any(fields[BODY]) for _, fields in entries]


class ScriptedReplica:
    """Has a record, a heartbeat and a stream; finishes what the test tells it to."""

    def __init__(self, redis: Redis, name: str = "r0", **record: Any) -> None:
        self.redis, self.name = redis, name
        values = {"id": name, "model": MODEL, "incarnation": "i1", "b": 4, "b_max": 4}
        self.record = ReplicaRecord(**(values | record))
        self._seq = 0

    async def start(self, state: State = State.SERVING) -> None:
        card = ModelCard(name=MODEL, path="", context=64, vocabulary=64, engine="emulated")
        async with self.redis.pipeline() as pipe:
            pipe.hset(names.model(MODEL), mapping=card.to_hash())
            pipe.sadd(names.MODELS, MODEL)
            pipe.sadd(names.REPLICAS, self.name)
            pipe.hset(names.replica(self.name), mapping=self._own_fields())
            await pipe.execute()
        await ensure_group(self.redis, names.batches(self.name), names.GROUP_REPLICA)
        await self.beat()
        await move(self.redis, self.name, State.STARTING, by="replica", why="start")
        if state is not State.STARTING:
            await move(self.redis, self.name, State.SERVING, by="replica", why="ready")
        if state not in (State.STARTING, State.SERVING):
            await move(self.redis, self.name, state, by="launcher", why="test")

    def _own_fields(self) -> dict[str, str]:
        owned = ("state", "since", "by", "why", "coefficients", "b_star", "B_star", "q")
        return {k: v for k, v in self.record.to_hash().items() if k not in owned}

    async def beat(self, milliseconds: int | None = None) -> None:
        """The heartbeat key; by default it does not expire while the test runs."""
        key = names.replica_alive(self.name)
        await self.redis.set(key, self.record.incarnation, px=milliseconds)

    async def die(self) -> None:
        await self.redis.delete(names.replica_alive(self.name))

    async def batches(self) -> list[tuple[bytes, Batch]]:
        entries = await self.redis.xrange(names.batches(self.name))
        return [(entry_id, decode(fields[BODY], Batch)) for entry_id, fields in entries]

    async def members(self) -> list[Generate]:
        return [decode(raw, Generate) for _, b in await self.batches() for raw in b.requests]

    async def ids(self) -> list[str]:
        return [request.id for request in await self.members()]

    async def finish_all(self, *, tell: bool = True) -> list[str]:
        """Answer everything in the stream; ``tell`` False: the metrics sample goes missing."""
        done = []
        for entry_id, batch in await self.batches():
            members = [decode(raw, Generate) for raw in batch.requests]
            await self.sample(members if tell else [], skip=not tell)
            await self.redis.xdel(names.batches(self.name), entry_id)
            done += [m.id for m in members]
        return done

    async def sample(self, members: list[Generate], *, skip: bool = False) -> None:
        """Publish a step; ``skip`` leaves a gap in the sequence instead."""
        self._seq += 1
        if skip:
            return
        finished = tuple(
            Finished(
                id=m.id,
                attempt=m.attempt,
                prompt_tokens=len(m.prompt),
                output_tokens=m.sampling.max_tokens,
                reason="length",
            )
            for m in members
        )
        sample = StepSample(
            replica=self.name,
            model=MODEL,
            incarnation=self.record.incarnation,
            seq=self._seq,
            time=0.0,
            seconds=0.01,
            b=len(members),
            finished=finished,
        )
        await self.redis.xadd(names.METRICS, {"kind": "step_sample", BODY: encode(sample)})

    async def commands(self) -> list[Any]:
        entries = await self.redis.xrange(names.control(self.name))
        return [decode_any(fields[BODY]) for _, fields in entries]


@contextlib.asynccontextmanager
async def running(url: str, **settings: Any) -> AsyncIterator[Dispatcher]:
    """A dispatcher in this process, stopped at the end."""
    values = {"policy": "least_loaded", "port": 0} | settings
    dispatcher = Dispatcher(DispatcherSettings(redis_url=url, **values))
    task = asyncio.create_task(dispatcher.leader.run())
    try:
        yield dispatcher
    finally:
        dispatcher.leader.stop()
        await task


async def drained(redis: Redis) -> bool:
    """No request waits anywhere: length and pending of the request stream are 0."""
    pending = await redis.xpending(names.requests(MODEL), names.GROUP_DISPATCHER)
    return bool(await redis.xlen(names.requests(MODEL)) == 0 and pending["pending"] == 0)
