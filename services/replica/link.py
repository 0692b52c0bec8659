"""The replica's side of Redis: reading what is sent to it, publishing what it computed.

``Intake`` reads the batch and control streams of all replicas of this process in one blocking
call. ``Publisher`` sends one replica's results while the engine computes the next step: tokens,
acknowledgements and samples of a turn in one transaction, repeated until Redis has taken it.
Repeating may deliver twice, never lose: readers drop what they have seen by ``offset`` and
``seq``.

When the entry of a batch is acknowledged: in the transaction that carries the last output of its
last member, never before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared import dead_letters, names
from shared.messages import BODY, Failed, Message, Output, StepReply, encode
from shared.redis_client import (
    BLOCK_MS,
    TRANSIENT,
    Backoff,
    ensure_group,
    is_missing_group,
    patiently,
)
from shared.replica_state import EVENTS_MAXLEN

log = logging.getLogger(__name__)

READ_COUNT = 256  # entries a read
BACKLOG = 128  # turns computed and not yet taken by Redis, after which computing waits

Fields = dict[bytes, bytes]
Handler = Callable[[str, bytes, bytes, Fields], None]  # replica, stream, entry id, fields


class Intake:
    """Reads the streams of several replicas with one consumer each, in one call."""

    def __init__(self, redis: Redis, replicas: Iterable[str], handle: Handler) -> None:
        self._redis, self._handle = redis, handle
        self._owner: dict[bytes, str] = {}
        for replica in replicas:
            self._owner[names.batches(replica).encode()] = replica
            self._owner[names.control(replica).encode()] = replica
        self._consumer = "inference"

    async def run(self) -> None:
        """Read until cancelled. A lost group is made again; a Redis that is away is waited for."""
        await patiently(self._ensure_groups, "reading of batches")
        await patiently(self._commands_left_over, "reading of commands")
        streams: dict[Any, Any] = dict.fromkeys(self._owner, ">")
        backoff = Backoff()
        while True:
            try:
                found = await self._redis.xreadgroup(
                    names.GROUP_REPLICA, self._consumer, streams, count=READ_COUNT, block=BLOCK_MS
                )
            except ResponseError as e:
                if not is_missing_group(e):
                    log.error("cannot read batches: %s", e)
                    await backoff.wait()
                await patiently(self._ensure_groups, "reading of batches")
                continue
            except TRANSIENT as e:
                log.warning("Redis is away (%s: %s); reading of batches waits", type(e).__name__, e)
                await backoff.wait()
                await patiently(self._ensure_groups, "reading of batches")
                continue
            backoff.reset()
            for stream, entries in found or ():
                for entry_id, fields in entries:
                    self._handle(self._owner[stream], stream, entry_id, fields)

    async def _commands_left_over(self) -> None:
        """Commands that an earlier process read and did not carry out; all may be repeated.

        Batches are not read again: what an earlier life left has been given back.
        """
        for stream, replica in self._owner.items():
            if stream != names.control(replica).encode():
                continue
            found = await self._redis.xreadgroup(
                names.GROUP_REPLICA, self._consumer, {stream: "0"}, count=READ_COUNT
            )
            for _, entries in found or ():
                for entry_id, fields in entries:
                    self._handle(replica, stream, entry_id, fields or {})

    async def _ensure_groups(self) -> None:
        for stream in self._owner:
            await ensure_group(self._redis, stream.decode(), names.GROUP_REPLICA)


class Turn(msgspec.Struct, kw_only=True):
    """What one turn of the serving loop wants published."""

    outputs: list[tuple[str, Output]] = []
    failures: list[tuple[str, Failed]] = []
    done: list[bytes] = []  # batch entries whose members are all answered
    obeyed: list[bytes] = []  # control entries carried out
    letters: list[dict[bytes | str, bytes | str]] = []  # for dead-letters
    events: list[dict[str, str]] = []  # for the audit log
    samples: list[tuple[str, Message]] = []  # (kind, sample)


class Publisher:
    """Sends turns in order; ``put`` never blocks, ``room`` does while Redis is away."""

    def __init__(self, redis: Redis, replica: str, model: str, metrics_kept: int) -> None:
        self._redis, self._replica, self._model = redis, replica, model
        self._metrics_kept = metrics_kept
        self._stream, self._control = names.batches(replica), names.control(replica)
        self._outbox: list[Turn] = []
        self._sending = 0
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()

    def put(self, turn: Turn) -> None:
        self._outbox.append(turn)
        self._drained.clear()
        self._wake.set()

    @property
    def backlog(self) -> int:
        """Turns that Redis has not taken yet."""
        return len(self._outbox) + self._sending

    async def room(self) -> None:
        """Return when computing may go on. Tokens computed already are kept, not dropped."""
        if self.backlog >= BACKLOG:
            await self._drained.wait()

    async def drained(self) -> None:
        """Return when everything put so far has been taken."""
        await self._drained.wait()

    def drop(self) -> None:
        """Forget what was not sent: it belongs to an incarnation that was declared dead."""
        self._outbox.clear()
        if not self._sending:
            self._drained.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            if not self._outbox:
                self._drained.set()
                self._wake.clear()
                await self._wake.wait()
            turns, self._outbox = self._outbox, []
            self._sending = len(turns)
            await self._send(turns)
            self._sending = 0

    async def _send(self, turns: list[Turn]) -> None:
        commands = self._commands(turns)
        backoff, told = Backoff(), False
        while commands:
            try:
                await self._execute(commands)
                return
            except (*TRANSIENT, ResponseError) as e:
                # ResponseError: the transaction as a whole was refused (memory, failover).
                if not told:
                    log.warning(
                        "%s: Redis took no results (%s: %s); they wait",
                        self._replica,
                        type(e).__name__,
                        e,
                    )
                    told = True
                await backoff.wait()

    async def _execute(self, commands: list[tuple[Any, ...]]) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            for result in await pipe.execute(raise_on_error=False):
                if isinstance(result, ResponseError):
                    log.error("%s: part of a publication was refused: %s", self._replica, result)

    def _commands(self, turns: list[Turn]) -> list[tuple[Any, ...]]:
        replies: dict[str, list[Output]] = {}
        commands: list[tuple[Any, ...]] = []
        done: list[bytes] = []
        for turn in turns:
            for gateway, output in turn.outputs:
                replies.setdefault(gateway, []).append(output)
            done.extend(turn.done)
        for gateway, outputs in replies.items():
            reply = StepReply(replica=self._replica, outputs=tuple(outputs))
            commands.append(("XADD", names.replies(gateway), "*", BODY, encode(reply)))
        for turn in turns:
            for gateway, failed in turn.failures:
                commands.append(("XADD", names.replies(gateway), "*", BODY, encode(failed)))
        commands += _taken(self._stream, done)
        commands += _taken(self._control, [entry for turn in turns for entry in turn.obeyed])
        for turn in turns:
            for letter in turn.letters:
                commands.append(_append(names.DEAD_LETTERS, dead_letters.MAXLEN, letter))
            for event in turn.events:
                commands.append(_append(names.EVENTS, EVENTS_MAXLEN, event))
            commands.extend(self._sample(kind, sample) for kind, sample in turn.samples)
        return commands

    def _sample(self, kind: str, sample: Message) -> tuple[Any, ...]:
        time = getattr(sample, "time", 0.0)
        return (
            *("XADD", names.METRICS, "MAXLEN", "~", self._metrics_kept, "*"),
            *("kind", kind, "replica", self._replica, "model", self._model),
            *("time", f"{time:.6f}", BODY, encode(sample)),
        )


def _taken(stream: str, entries: list[bytes]) -> list[tuple[Any, ...]]:
    """Acknowledge and delete entries of a stream."""
    if not entries:
        return []
    return [("XACK", stream, names.GROUP_REPLICA, *entries), ("XDEL", stream, *entries)]


def _append(stream: str, limit: int, fields: Mapping[Any, Any]) -> tuple[Any, ...]:
    flat = [item for pair in fields.items() for item in pair]
    return ("XADD", stream, "MAXLEN", "~", limit, "*", *flat)
