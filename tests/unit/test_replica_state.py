import pytest

from shared import names
from shared.replica_state import LEGAL, Refused, State, move


async def test_a_legal_move_writes_state_and_event(redis):
    assert await move(redis, "r", State.STARTING, by="replica", why="boot") is None
    assert await move(redis, "r", State.SERVING, by="replica", why="loaded") is State.STARTING
    record = await redis.hgetall(names.replica("r"))
    assert (record[b"state"], record[b"by"], record[b"why"]) == (b"serving", b"replica", b"loaded")
    events = await redis.xrange(names.EVENTS)
    assert [e[1][b"to"] for e in events] == [b"starting", b"serving"]


@pytest.mark.parametrize("start", list(State))
@pytest.mark.parametrize("to", list(State))
async def test_only_the_table_moves(redis, start, to):
    await redis.hset(names.replica("r"), mapping={"state": start.value})
    if to in LEGAL[start]:
        assert await move(redis, "r", to, by="t", why="t") is start
    else:
        with pytest.raises(Refused, match=f"r is {start}"):
            await move(redis, "r", to, by="t", why="t")
        assert await redis.hget(names.replica("r"), "state") == start.value.encode()


async def test_an_old_incarnation_moves_nothing(redis):
    await redis.hset(names.replica("r"), mapping={"state": "serving", "incarnation": "new"})
    with pytest.raises(Refused, match="incarnation old"):
        await move(redis, "r", State.DEAD, by="d", why="t", incarnation="old")
