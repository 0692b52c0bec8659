"""Federated sessions in Redis: the coordinator's record, and others' wishes about it.

The launcher opens a session; from then on the coordinator alone writes its record, step by
step, so that another coordinator takes it up where it stopped. Launcher, gateway and operators
put wishes into a second hash (join, leave, pause, stop), which the coordinator takes between
the steps of a round.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
import orjson
from redis.asyncio import Redis

from shared import names
from shared.lease import FENCE_CHECK
from shared.replica_state import EVENTS_MAXLEN

KEEP_ENDED = 7 * 24 * 3600  # seconds that an ended session can still be looked at
LEAST = 2  # clients of a session that began with several
TOO_FEW = "clients left"  # in the reason of one that ended for the lack of them


class Phase(StrEnum):
    """Where a round stands; written before the phase begins."""

    OPEN = "open"
    TRAIN = "train"
    AGGREGATE = "aggregate"
    CHECK = "check"
    ENDED = "ended"


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A session's record. Losses in nats per token, times in Redis seconds."""

    id: str
    adapter: str
    base: str
    clients: tuple[str, ...]
    server: str
    why: str = ""
    created: float = 0.0
    phase: Phase = Phase.OPEN
    paused: bool = False
    round: int = 0  # the adapter's own count; the round in work or just done
    attempt: int = 0  # of that round; job ids carry it
    done: int = 0  # rounds of this session that published a version or kept one
    missed: int = 0  # rounds in a row without a quorum
    parent: str = ""  # version the round opens with
    version: str = ""  # version that the round makes
    started: float = 0.0  # of the round
    deadline: float = 0.0  # of the round's local training
    losses: dict[str, tuple[float, ...]] = {}  # client -> local loss by round
    loss: float | None = None  # F of the last round
    heldout: dict[str, float] = {}  # client -> held-out loss of version ``heldout_of``
    heldout_of: str = ""
    last_heldout: dict[str, float] = {}  # client -> what it measured last, of whatever version
    kept_back: int = 0  # rounds in a row whose version was not promoted
    least: int = LEAST  # clients below which the session ends
    alone: bool = False  # its clients serve nothing beside
    B: dict[str, int] = {}  # micro-batch a client in this round
    samples: dict[str, int] = {}  # client -> samples it held when it took part
    results: dict[str, Any] = {}  # client -> RoundResult of the round in work
    ended: str = ""  # why it ended

    def to_hash(self) -> dict[str, str]:
        """Text fields; what is no text or number as JSON."""
        plain = msgspec.to_builtins(self)
        return {k: v if isinstance(v, str) else orjson.dumps(v).decode() for k, v in plain.items()}

    @classmethod
    def from_hash(cls, raw: Mapping[bytes, bytes]) -> Session:
        """Raises msgspec.ValidationError on a damaged record."""
        values: dict[str, Any] = {}
        texts = {"id", "adapter", "base", "server", "why", "phase", "parent", "version", "ended"}
        texts |= {"heldout_of"}
        for key, value in raw.items():
            name = key.decode()
            values[name] = value.decode() if name in texts else orjson.loads(value)
        return msgspec.convert(values, cls)


def new_id(adapter: str) -> str:
    """A session id of letters, digits and dashes (job ids are made of it)."""
    return f"{re.sub('[^A-Za-z0-9]+', '-', adapter)[:40].strip('-')}-{secrets.token_hex(4)}"


_OPEN = """
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('HGET', ARGV[1] .. id, 'adapter') == ARGV[3] then return id end
end
local now = redis.call('TIME')
redis.call('HSET', KEYS[2], 'created', now[1] .. '.' .. string.format('%06d', now[2]),
           unpack(ARGV, 6))
redis.call('SADD', KEYS[1], ARGV[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', 'kind', 'session_opened', 'session',
           ARGV[2], 'adapter', ARGV[3], 'why', ARGV[5])
return ARGV[2]
"""

_SAVE = (
    FENCE_CHECK
    + """
redis.call('HSET', KEYS[2], unpack(ARGV, 2))
return 1
"""
)

_END = (
    FENCE_CHECK
    + """
redis.call('HSET', KEYS[2], 'phase', 'ended', 'ended', ARGV[2])
redis.call('SREM', KEYS[3], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[4])
redis.call('DEL', KEYS[4])
redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[5], '*', 'kind', 'session_ended', 'session',
           ARGV[3], 'adapter', redis.call('HGET', KEYS[2], 'adapter'), 'why', ARGV[2],
           'rounds', redis.call('HGET', KEYS[2], 'done') or '0')
return 1
"""
)


async def open_session(redis: Redis, session: Session) -> str:
    """Make it known to the coordinator; returns its id, or that of the adapter's live session."""
    fields = {k: v for k, v in session.to_hash().items() if k != "created"}
    flat = [item for pair in fields.items() for item in pair]
    found = await redis.eval(
        _OPEN,
        3,
        names.SESSIONS,
        names.session(session.id),
        names.EVENTS,
        names.session(""),
        session.id,
        session.adapter,
        str(EVENTS_MAXLEN),
        session.why,
        *flat,
    )
    return str(found.decode())


async def read(redis: Redis, session_id: str) -> Session | None:
    """None: unknown or long ended."""
    raw = await redis.hgetall(names.session(session_id))
    return Session.from_hash(raw) if raw else None


async def live(redis: Redis) -> list[Session]:
    """All sessions that have not ended, oldest first."""
    found = []
    for raw in await redis.smembers(names.SESSIONS):
        session = await read(redis, raw.decode())
        if session is not None:
            found.append(session)
    return sorted(found, key=lambda s: (s.created, s.id))


async def save(redis: Redis, session: Session, fence_key: str, token: str) -> None:
    """Write the record if the coordinator's lease is still ours; else Redis replies FENCED."""
    flat = [item for pair in session.to_hash().items() for item in pair]
    await redis.eval(_SAVE, 2, fence_key, names.session(session.id), token, *flat)


async def end(redis: Redis, session: Session, why: str, fence_key: str, token: str) -> None:
    """Mark it ended, with an event; its record can be looked at for a week."""
    keys = (
        fence_key,
        names.session(session.id),
        names.SESSIONS,
        names.session_wishes(session.id),
        names.EVENTS,
    )
    await redis.eval(
        _END, len(keys), *keys, token, why, session.id, str(KEEP_ENDED), str(EVENTS_MAXLEN)
    )


# ---------------------------------------------------------------- wishes


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What others want of a session; values say why."""

    join: dict[str, str] = {}  # replica -> why
    leave: dict[str, str] = {}
    stop: str = ""
    pause: bool = False  # stays until it is taken back


async def wish(redis: Redis, session_id: str, what: str, why: str) -> None:
    """``what``: ``join:<replica>``, ``leave:<replica>``, ``stop`` or ``pause``."""
    await redis.hset(names.session_wishes(session_id), what, why)


async def unwish(redis: Redis, session_id: str, *what: str) -> None:
    """Take wishes back, or mark them as carried out."""
    if what:
        await redis.hdel(names.session_wishes(session_id), *what)


async def wishes(redis: Redis, session_id: str) -> Wishes:
    raw = await redis.hgetall(names.session_wishes(session_id))
    plain = {k.decode(): v.decode() for k, v in raw.items()}

    def of(kind: str) -> dict[str, str]:
        return {k.partition(":")[2]: v for k, v in plain.items() if k.startswith(f"{kind}:")}

    return Wishes(
        join=of("join"), leave=of("leave"), stop=plain.get("stop", ""), pause="pause" in plain
    )
