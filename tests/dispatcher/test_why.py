"""``collm why REQUEST``: the decision's numbers, and what came of it."""

from __future__ import annotations

import orjson
import pytest
from redis.asyncio import Redis

from collm import fate
from collm.redis_server import RedisServer
from shared import names
from shared.messages import Finished, Sampling
from shared.slo import Slo
from tests.dispatcher.peers import MODEL, ScriptedGateway, ScriptedReplica, eventually, running


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

    (release,) = await fate.decisions(redis, "q")
    numbers = orjson.loads(release["numbers"])
    assert release["replica"] == "r0"
    assert numbers["order:q.0/1"] == "slack"
    assert numbers["b_limit"] == 4
    assert "predicted:q.0/1" in numbers
    assert "4 tokens, length" in release["ended:q.0/1"]
    assert await fate.decisions(redis, "unknown") == []
    assert await fate.decisions(redis, "chatcmpl-q") == [release], "as the answer names it"


async def test_a_decision_notes_what_was_promised_and_a_refusal_why(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, context=64)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url):
        await gateway.send("good.0", slo=Slo(ttft_ms=500, tpot_ms=50), deadline=3.0)
        await gateway.send("long.0", sampling=Sampling(max_tokens=1000))
        await eventually(replica.ids, "released")
        (refusal,) = await eventually(lambda: fate.decisions(redis, "long"), "refused")
        (release,) = await fate.decisions(redis, "good")
    came, *limits = orjson.loads(release["numbers"])["limits:good.0/1"]
    assert limits == [0.5, 0.05, 2.0]
    assert came == pytest.approx(float(release["released"]) - 1.0, abs=1e-3)
    assert release["came:good.0/1"] == f"{came:.4f} s before its release"
    assert "carry at most 64" in refusal["refused"]
    assert refusal["refused"].endswith("(400)")


async def test_a_request_that_waits_is_found_with_its_place(
    redis: Redis, redis_server: RedisServer
) -> None:
    gateway, replica = ScriptedGateway(redis), ScriptedReplica(redis, b=1, b_max=1)
    await gateway.start()
    await replica.start()
    async with running(redis_server.url):
        for name in ("first.0", "second.0", "third.0"):
            await gateway.send(name, slo=Slo(ttft_ms=500))
        await eventually(replica.ids, "one is released")
        waits = await eventually(lambda: fate.waiting(redis, "chatcmpl-third"), "it waits")
    (choice,) = waits
    assert (choice["key"], choice["stream"]) == ("third.0/1", names.requests(MODEL))
    assert (choice["ttft_ms"], choice["arrival"]) == ("500", "1.000000")
    assert int(choice["ahead"]) in (1, 2)  # the first goes when it is released
    assert await fate.waiting(redis, "fourth") == []


def test_a_course_is_compared_with_the_limits() -> None:
    end = Finished("q.0", 1, 3, 5, "length", started=10.5, first_token=11.0)
    told = fate.course(10.0, fate.Limits(1.0, 1.5, 0.5, 4.0), 13.0, end)
    assert told == {
        "started": "0.5000 s after its release",
        "first_token": "2.0000 s after it came (limit 1.5 s: missed by 0.5000 s)",
        "ended": "4.0000 s after it came: 5 tokens, length (limit 4 s: kept)",
        "per_token": "0.5000 s (limit 0.5 s: kept)",
    }
    again = Finished("q.0", 2, 3, 1, "length", started=10.5, first_token=11.0)
    told = fate.course(10.0, fate.Limits(1.0, 1.5, 0.5, None), 13.0, again)
    assert told["first_token"] == "2.0000 s after it came", "its client saw an earlier one"
    assert "per_token" not in told
    assert fate.course(10.0, None, 13.0, end)["ended"].startswith("3.0000 s after its release")


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
    assert fate.is_of(key, asked) is same
