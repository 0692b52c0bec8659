"""``collm why REQUEST``: the decision's numbers, and what came of it."""

from __future__ import annotations

import orjson
import pytest
from redis.asyncio import Redis

from collm import why
from collm.redis_server import RedisServer
from tests.dispatcher.peers import ScriptedGateway, ScriptedReplica, eventually, running


async def test_a_requests_decision_can_be_read_with_predicted_and_actual_times(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url, policy="collm"):
        await gateway.send("q.0")
        await eventually(replica.ids, "released")
        await replica.finish_all()

    (release,) = await why.request(redis, "q")
    numbers = orjson.loads(release["numbers"])
    assert release["replica"] == "r0"
    assert numbers["order:q.0/1"] == "slack"
    assert numbers["b_limit"] == 4
    assert "predicted:q.0/1" in numbers
    assert "4 tokens, length" in release["ended:q.0/1"]
    assert await why.request(redis, "unknown") == []
    assert await why.request(redis, "chatcmpl-q") == [release], "as the answer names it"


@pytest.mark.parametrize(
    ("key", "asked", "same"),
    [
        ("q.0/1", "q", True),
        ("ticket-9-666e90e0.0/1", "ticket-9", True),
        ("ticket-9-666e90e0.0/1", "ticket-9-666e90e0", True),
        ("ticket-9-666e90e0.0/1", "ticket", False),
        ("ticket-90-666e90e0.0/1", "ticket-9", False),
        ("ticket-9-nothexad.0/1", "ticket-9", False),
    ],
)
def test_a_request_is_known_by_the_id_its_client_gave(key: str, asked: str, same: bool) -> None:
    assert why._is(key, asked) is same
