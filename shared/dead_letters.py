"""What could not be processed goes here, with its bytes and the reason; the consumer lives on."""

from __future__ import annotations

from collections.abc import Mapping

from redis.asyncio import Redis

from shared import names

MAXLEN = 10_000
FIELD = b"field:"  # prefix of the original entry's fields, so that it can be queued again


async def bury(
    redis: Redis,
    stream: str,
    group: str | None,
    entry_id: bytes | str,
    fields: Mapping[bytes, bytes],
    reason: str,
    *,
    by: str,
) -> None:
    """Move a stream entry to ``dead-letters`` in one transaction (ack and deletion included).

    ``group`` None: the stream is read without a group. ``by`` names the process that gave up.
    """
    letter = _letter(stream, entry_id, fields, reason, by)
    async with redis.pipeline(transaction=True) as pipe:
        pipe.xadd(names.DEAD_LETTERS, letter, maxlen=MAXLEN, approximate=True)
        if group is not None:
            pipe.xack(stream, group, entry_id)
        pipe.xdel(stream, entry_id)
        await pipe.execute()


async def write(
    redis: Redis, stream: str, fields: Mapping[str, str | bytes], reason: str, *, by: str
) -> None:
    """A letter about what lies in no stream any more; ``stream`` is where it belongs."""
    raw = {k.encode(): v.encode() if isinstance(v, str) else v for k, v in fields.items()}
    letter = _letter(stream, "", raw, reason, by)
    await redis.xadd(names.DEAD_LETTERS, letter, maxlen=MAXLEN, approximate=True)


def _letter(
    stream: str, entry_id: bytes | str, fields: Mapping[bytes, bytes], reason: str, by: str
) -> dict[bytes | str, bytes | str]:
    letter: dict[bytes | str, bytes | str] = {"stream": stream, "reason": reason, "by": by}
    letter["entry"] = entry_id
    letter.update({FIELD + name: value for name, value in fields.items()})
    return letter
