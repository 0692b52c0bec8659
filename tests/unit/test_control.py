"""Control streams that nobody reads are bounded, whoever writes to them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.coordinator.cluster import Cluster
from services.dispatcher.scripts import TAKE_BACK
from shared import control, data_homes, names
from shared.control import send_command
from shared.messages import BODY, Cancel, decode

ROOT = Path(__file__).resolve().parents[2]
MANY = 250  # Redis cuts whole nodes of a hundred entries


async def test_a_command_says_its_kind_and_carries_its_message(redis: Redis) -> None:
    await send_command(redis, "collm:test:control", Cancel(id="a"), id="a")
    ((_, fields),) = await redis.xrange("collm:test:control")
    assert (fields[b"kind"], fields[b"id"]) == (b"cancel", b"a")
    assert decode(fields[BODY], Cancel).id == "a"


async def test_commands_to_a_replica_that_is_gone_do_not_fill_redis(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAXLEN", 10)
    for n in range(MANY):
        await data_homes.send_delete(redis, "by-data", "law")
        await Cluster(redis).configure("by-coordinator", B=n)
    async with redis.pipeline(transaction=False) as pipe:
        for n in range(MANY):
            send_command(pipe, names.control("by-dispatcher"), Cancel(id=str(n)))
        await pipe.execute()
    for replica in ("by-data", "by-coordinator", "by-dispatcher"):
        assert await redis.xlen(names.control(replica)) < 2 * 100, replica


def test_no_command_goes_round_the_bound() -> None:
    """Each append to a control stream is ``send_command`` or the dispatcher's script."""
    assert f"'MAXLEN', '~', {control.MAXLEN}" in TAKE_BACK.text
    past = re.compile(r"xadd\(\s*names\.(\w+_)?control\(|xadd\(\s*names\.COORDINATOR_CONTROL")
    sources = [p for part in ("services", "shared", "collm") for p in (ROOT / part).rglob("*.py")]
    assert len(sources) > 100
    assert [p.name for p in sources if past.search(p.read_text())] == []
