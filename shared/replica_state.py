"""The states of a replica and the one compare-and-set that moves it.

Every transition goes through one Lua script: it checks the state found, writes the new one
with who and why, and appends it to ``events``. An illegal transition is refused and says so.
"""

from __future__ import annotations

from enum import StrEnum

from redis.asyncio import Redis

from shared import names

EVENTS_MAXLEN = 100_000


class State(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    IDLE = "idle"
    COMBINED = "combined"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


# The dispatcher may release to these; Idle replicas finish their queue and get nothing new.
DISPATCHABLE = frozenset({State.SERVING, State.COMBINED})
ANSWERING = DISPATCHABLE | {State.IDLE}

LEGAL: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.SERVING, State.DRAINING, State.DEAD, State.STARTING}),
    State.SERVING: frozenset({State.IDLE, State.COMBINED, State.DRAINING, State.DEAD}),
    State.IDLE: frozenset({State.SERVING, State.COMBINED, State.DRAINING, State.DEAD}),
    State.COMBINED: frozenset({State.SERVING, State.DRAINING, State.DEAD}),
    State.DRAINING: frozenset({State.STOPPED, State.DEAD}),
    State.STOPPED: frozenset({State.STARTING}),
    State.DEAD: frozenset({State.STARTING}),
}

_MOVE = """
local now = redis.call('TIME')
local found = redis.call('HGET', KEYS[1], 'state') or ''
if not string.find(',' .. ARGV[1] .. ',', ',' .. found .. ',', 1, true) then return {0, found} end
local incarnation = redis.call('HGET', KEYS[1], 'incarnation')
if ARGV[6] ~= '' and incarnation ~= ARGV[6] then return {-1, found} end
local time = now[1] .. '.' .. string.format('%06d', now[2])
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'since', time, 'by', ARGV[3], 'why', ARGV[4])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[7], '*', 'kind', 'state', 'replica', ARGV[5],
           'from', found, 'to', ARGV[2], 'by', ARGV[3], 'why', ARGV[4], 'time', time)
return {1, found}
"""


class Refused(RuntimeError):
    """The replica was not in a state from which this transition is legal."""


async def move(
    redis: Redis,
    replica: str,
    to: State,
    *,
    by: str,
    why: str,
    expected: frozenset[State] | None = None,
    incarnation: str = "",
) -> State | None:
    """Move ``replica`` to state ``to``; returns the state it was in (None: it had none).

    ``expected`` narrows the legal origins; ``incarnation`` (if given) must still be the
    replica's. Raises Refused with the state found when the move is not legal.
    """
    legal = {state for state, targets in LEGAL.items() if to in targets}
    if expected is not None:
        legal &= expected
    origins = ",".join(sorted(legal))
    if to is State.STARTING:
        origins += ","  # a new replica has no state yet
    moved, found = await redis.eval(
        _MOVE,
        2,
        names.replica(replica),
        names.EVENTS,
        origins,
        to.value,
        by,
        why,
        replica,
        incarnation,
        EVENTS_MAXLEN,
    )
    was = found.decode()
    if moved == -1:
        raise Refused(f"{replica} -> {to}: incarnation {incarnation} is not the current one")
    if moved == 0:
        raise Refused(
            f"{replica} is {was or 'unknown'}: {to} is reached only from "
            f"{', '.join(sorted(legal)) or 'nothing'}"
        )
    return State(was) if was else None


async def event(redis: Redis, kind: str, **fields: str | int | float) -> None:
    """Append to the audit log ``events``. ``kind`` names what happened; fields are text."""
    await redis.xadd(
        names.EVENTS,
        {"kind": kind, **{k: str(v) for k, v in fields.items()}},
        maxlen=EVENTS_MAXLEN,
        approximate=True,
    )
