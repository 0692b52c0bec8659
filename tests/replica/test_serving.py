"""One emulated replica as a process: answers, order, refusals, cancellation, limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from collm.redis_server import RedisServer
from shared import names
from shared.messages import Cancel, Configure, Failed, LoadAdapter, Sampling
from shared.records import ModelCard
from tests.replica.harness import Cluster, Process, generate, profile, running, until


@pytest.fixture
def slow(redis_server: RedisServer, redis: Redis, tmp_path: Path) -> object:
    """A replica whose every step takes 20 ms."""
    path = profile(tmp_path, 0.02)
    with running(redis_server.url, tmp_path, profile=path) as process:
        yield process


async def test_a_request_is_answered_in_order_and_its_batch_entry_goes(
    slow: Process, redis: Redis
) -> None:
    cluster = Cluster(redis)
    await cluster.serving()
    await cluster.release(generate("a", tokens=5), generate("b", tokens=2))
    last = await cluster.finish("a")
    assert last.finish == "length"
    assert set(last.stamps) >= {
        "received", "queued", "released", "started", "first_token", "finished",
    }  # fmt: skip
    assert len(await cluster.tokens("a")) == 5
    assert len(await cluster.tokens("b")) == 2
    await cluster.drained()
    pending = await redis.xpending(names.batches("replica-0"), names.GROUP_REPLICA)
    assert pending["pending"] == 0


async def test_everything_emulated_is_marked(slow: Process, redis: Redis) -> None:
    cluster = Cluster(redis)
    assert (await cluster.serving()).engine == "emulated"
    card = ModelCard.from_hash(await redis.hgetall(names.model("m")))
    assert card.emulated
    await cluster.release(generate("a"))
    await cluster.finish("a")
    assert await cluster.left("a") == "length"
    assert all(sample.emulated for sample in await cluster.samples())


async def test_samples_are_numbered_without_gaps(slow: Process, redis: Redis) -> None:
    cluster = Cluster(redis)
    record = await cluster.serving()
    for i in range(5):
        await cluster.release(generate(f"r{i}", tokens=3 + i))
    for i in range(5):
        await cluster.finish(f"r{i}")
    await cluster.left("r4")
    samples = await cluster.samples()
    assert [s.seq for s in samples] == list(range(1, len(samples) + 1))
    assert {s.incarnation for s in samples} == {record.incarnation}
    assert sum(s.decode_tokens for s in samples) == sum(2 + i for i in range(5))


async def test_a_cancelled_request_stops_and_tells_no_more(slow: Process, redis: Redis) -> None:
    cluster = Cluster(redis)
    await cluster.serving()
    await cluster.release(generate("long", tokens=1000))

    async def begun() -> bool:
        return len(await cluster.tokens("long")) > 2

    await until(begun, "tokens flow")
    await cluster.command(Cancel(id="long"))
    assert await cluster.left("long") == "cancelled"
    await cluster.drained()
    assert len(await cluster.tokens("long")) < 900
    assert (await cluster.outputs("long"))[-1].finish is None


async def test_a_cancel_that_overtakes_its_request_still_counts(
    slow: Process, redis: Redis
) -> None:
    cluster = Cluster(redis)
    await cluster.serving()
    await cluster.command(Cancel(id="early"))

    async def obeyed() -> bool:
        return await redis.xlen(names.control("replica-0")) == 0

    await until(obeyed, "cancel read")
    await cluster.release(generate("early", tokens=1000))
    await cluster.drained()
    assert await cluster.outputs("early") == []


async def test_a_poisoned_member_goes_to_dead_letters_and_the_others_are_answered(
    slow: Process, redis: Redis
) -> None:
    from shared.messages import encode

    cluster = Cluster(redis)
    await cluster.serving()
    damaged = encode(generate("bad")).replace(b"sampling", b"samplinx")
    await cluster.release(b"\xc1\xff", generate("good"), damaged)
    assert (await cluster.finish("good")).finish == "length"
    failed = await cluster.told(Failed, "bad")
    assert failed.status == 500
    await cluster.drained()
    letters = await redis.xrange(names.DEAD_LETTERS)
    assert {fields[b"field:body"] for _, fields in letters} == {b"\xc1\xff", damaged}


@pytest.mark.parametrize("stream", ["batches", "control"])
async def test_an_entry_that_is_no_message_is_buried_and_the_loop_lives(
    slow: Process, redis: Redis, stream: str
) -> None:
    cluster = Cluster(redis)
    await cluster.serving()
    name = getattr(names, stream)("replica-0")
    await redis.xadd(name, {b"body": b"\x00junk"})
    await redis.xadd(name, {b"other": b"thing"})

    async def buried() -> bool:
        return await redis.xlen(names.DEAD_LETTERS) == 2 and await redis.xlen(name) == 0

    await until(buried, "both buried")
    await cluster.release(generate("a"))
    await cluster.finish("a")


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"tokens": 100_000}, 400, "context_length_exceeded"),
        ({"model": "other"}, 404, "model_not_found"),
        ({"prompt": (1, 99_999)}, 400, None),
        ({"adapter": "nobody"}, 404, "model_not_found"),
    ],
)
async def test_what_can_never_be_served_is_refused_with_the_reason(
    slow: Process, redis: Redis, changes: dict[str, object], status: int, code: str | None
) -> None:
    cluster = Cluster(redis)
    await cluster.serving()
    await cluster.release(generate("bad", **changes))
    failed = await cluster.told(Failed, "bad")
    assert (failed.status, failed.code) == (status, code)
    assert await cluster.left("bad") == "failed"
    await cluster.drained()


async def test_the_concurrency_limit_changes_live(slow: Process, redis: Redis) -> None:
    cluster = Cluster(redis)
    await cluster.serving()
    await cluster.command(Configure(b=2, B=3))

    async def in_force() -> bool:
        record = await cluster.record()
        return (record.b, record.B) == (2, 3)

    await until(in_force, "b = 2, B = 3")
    await cluster.release(*(generate(f"r{i}", tokens=6) for i in range(6)))
    for i in range(6):
        await cluster.finish(f"r{i}")
    await cluster.left("r5")
    assert max(s.b for s in await cluster.samples()) == 2


async def test_a_later_attempt_takes_the_place_of_the_running_one(
    slow: Process, redis: Redis
) -> None:
    cluster = Cluster(redis)
    await cluster.serving()
    await cluster.release(generate("r", tokens=400))

    async def begun() -> bool:
        return len(await cluster.tokens("r")) >= 3

    await until(begun, "tokens flow")
    had = (await cluster.tokens("r"))[:3]
    again = generate("r", tokens=8, attempt=2, generated=had)
    await cluster.release(again)
    last = await cluster.finish("r", attempt=2)
    assert last.finish == "length"
    assert (await cluster.outputs("r", attempt=2))[0].offset == 3
    assert len(await cluster.tokens("r", attempt=2)) == 8
    await cluster.drained()


async def test_the_same_attempt_twice_is_answered_once(slow: Process, redis: Redis) -> None:
    cluster = Cluster(redis)
    await cluster.serving()
    request = generate("r", tokens=20)
    await cluster.release(request)
    await cluster.release(request)
    await cluster.finish("r")
    await cluster.drained()
    offsets = [o.offset for o in await cluster.outputs("r")]
    assert offsets == list(range(20))


async def test_an_answer_is_the_same_in_every_batch_and_as_a_continuation(
    slow: Process, redis: Redis
) -> None:
    cluster = Cluster(redis)
    await cluster.serving()
    await cluster.release(generate("one", tokens=10))
    await cluster.release(*(generate(f"x{i}", tokens=10) for i in range(5)))
    await cluster.finish("one")
    whole = await cluster.tokens("one")
    await cluster.finish("x3")
    assert await cluster.tokens("x3") == whole
    await cluster.release(generate("two", tokens=10, generated=whole[:4]))
    await cluster.finish("two")
    assert (await cluster.tokens("two"))[4:] == whole[4:]


async def test_an_adapter_is_loaded_told_and_served_with_its_version(
    slow: Process, redis: Redis
) -> None:
    cluster = Cluster(redis)
    await cluster.serving()
    await cluster.command(LoadAdapter(name="x", version="v1", path="", reply_to="me"))

    async def told() -> bool:
        events = await redis.xrange(names.EVENTS)
        return any(f.get(b"reply_to") == b"me" and f[b"ok"] == b"1" for _, f in events)

    await until(told, "event of the load")
    await cluster.release(generate("a", adapter="x"))
    assert (await cluster.finish("a")).adapter_version == "v1"

    async def recorded() -> bool:
        return (await cluster.record()).adapters == {"x": "v1"}

    await until(recorded, "record names the adapter")


async def test_an_answer_may_end_by_itself_when_eos_counts(slow: Process, redis: Redis) -> None:
    cluster = Cluster(redis)
    await cluster.serving()
    sampling = Sampling(max_tokens=2000, temperature=0)
    await cluster.release(*(generate(f"r{i}", sampling=sampling) for i in range(4)))
    for i in range(4):
        assert (await cluster.finish(f"r{i}")).finish == "stop"
