"""The reader of ``replies:<gateway>``: every token, error and loss comes through here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from redis.asyncio import Redis

from shared import names
from shared.dead_letters import bury
from shared.messages import BODY, DecodeError, Message, decode_any
from shared.redis_client import BLOCK_MS, TRANSIENT, Backoff, patiently

log = logging.getLogger(__name__)

COUNT = 512  # entries a read
TRIM_SECONDS = 0.5
# When replies come this densely, the next read waits a moment and brings more at once: reading
# costs far more a round trip than an entry.
BUSY = 4
GATHER_SECONDS = 0.001


class Inbox:
    """Reads in order and hands each message on; read entries are trimmed away."""

    def __init__(
        self,
        redis: Redis,
        gateway: str,
        receive: Callable[[Message], None],
        *,
        on_away: Callable[[], None],
        on_back: Callable[[], None],
    ) -> None:
        self._redis, self._gateway = redis, gateway
        self._stream = names.replies(gateway)
        self._receive = receive
        self._on_away, self._on_back = on_away, on_back
        self._last = b"0-0"
        self._trimmed_at = 0.0
        self._trimmed = self._last
        self._moved = asyncio.Event()
        self.connected = False

    @property
    def position(self) -> tuple[int, int]:
        """Id of the last entry read."""
        return stream_id(self._last)

    async def reached(self, position: tuple[int, int]) -> None:
        """Until everything up to this id has been read."""
        while self.position < position:
            self._moved.clear()
            await self._moved.wait()

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            try:
                entries = await self._read()
            except TRANSIENT as e:
                if self.connected:
                    log.warning("Redis is away (%s); waiting", type(e).__name__)
                    self.connected = False
                    self._on_away()
                await backoff.wait()
                continue
            if not self.connected:
                self.connected = True
                backoff.reset()
                self._on_back()
            for id, fields in entries:
                self._last = id
                await self._entry(id, fields)
            if entries:
                self._moved.set()
            await self._trim()
            if len(entries) >= BUSY:
                await asyncio.sleep(GATHER_SECONDS)

    async def _read(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        block = BLOCK_MS if self.connected else 1  # the first answer says that Redis is there
        found = await self._redis.xread({self._stream: self._last}, count=COUNT, block=block)
        if not found:
            return []
        if isinstance(found, dict):  # RESP3
            (streams,) = found.values()
            return [entry for part in streams for entry in part]
        entries: list[tuple[bytes, dict[bytes, bytes]]] = found[0][1]
        return entries

    async def _entry(self, entry: bytes, fields: dict[bytes, bytes]) -> None:
        try:
            self._receive(decode_any(fields.get(BODY, b"")))
        except DecodeError as e:
            reason = e.reason
            log.error("a reply does not decode and goes to dead-letters: %s", reason)
            await patiently(
                lambda: bury(
                    self._redis, self._stream, None, entry, fields, reason, by=self._gateway
                ),
                "a dead letter",
            )

    async def _trim(self) -> None:
        """Only what has been read; a few times a second is enough."""
        now = asyncio.get_running_loop().time()
        if self._last == self._trimmed or now - self._trimmed_at < TRIM_SECONDS:
            return
        milliseconds, sequence = self.position
        try:
            await self._redis.xtrim(
                self._stream, minid=f"{milliseconds}-{sequence + 1}", approximate=False
            )
        except TRANSIENT as e:
            log.debug("the reply stream was not trimmed: %s", e)
            return
        self._trimmed, self._trimmed_at = self._last, now


def stream_id(raw: bytes) -> tuple[int, int]:
    """``b"5-2"`` -> (5, 2); stream ids compare as such pairs."""
    milliseconds, _, sequence = raw.partition(b"-")
    return int(milliseconds), int(sequence or 0)
