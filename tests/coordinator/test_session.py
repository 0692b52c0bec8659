"""Whole sessions over real Redis, rq workers and processes; each kind of bad weather."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import msgspec
import pytest
from redis.asyncio import Redis

from services.coordinator.meters import Meters
from shared import names, sessions
from shared.leader import first
from shared.lease import is_fenced
from shared.messages import BODY, SuspendTraining, encode
from shared.replica_state import State, move
from shared.stopwatch import from_words
from tests.coordinator.conftest import REPLICAS, TRAINING, Coordinators, Fleet


def failures(meters: Meters) -> dict[str, float]:
    (family,) = meters.failures.collect()
    counted = [s for s in family.samples if s.name.endswith("_total")]
    return {s.labels["reason"]: s.value for s in counted}


async def test_a_session_trains_publishes_and_gives_its_members_back(
    cluster: Fleet, coordinators: Coordinators, redis: Redis
) -> None:
    await coordinators.start()
    session = await cluster.open(*REPLICAS)
    ended = await cluster.event("session_ended")
    assert ended["why"] == "2 rounds done"
    versions = await cluster.registry.versions("chat")
    assert [(v.version, v.parent, v.round) for v in versions] == [
        ("r0", "", 0),
        ("r1", "r0", 1),
        ("r2", "r1", 2),
    ]
    assert versions[0].quality == 1.0 < versions[1].quality < versions[2].quality
    done = await cluster.events("round_done")
    assert [float(d["heldout"]) for d in done] == sorted(
        (float(d["heldout"]) for d in done), reverse=True
    )
    assert done[0]["used"] == "r0,r1,r2"
    assert 0 < float(done[0]["aggregation_error"]) < 1
    for replica in REPLICAS:
        assert await cluster.state(replica) == "serving"
        loads = [fields[b"kind"] for _, fields in await redis.xrange(names.control(replica))].count(
            b"load_adapter"
        )
        assert loads == 2
        assert await redis.hget(names.replica(replica), "q") == str(versions[2].quality).encode()
    adapter = await cluster.registry.get("chat")
    assert adapter is not None
    assert adapter.trained == dict.fromkeys(REPLICAS, 8)
    assert await redis.smembers(names.SESSIONS) == set()
    kept = await sessions.read(redis, session)
    assert kept is not None
    assert kept.phase == "ended"


async def test_a_round_says_where_its_time_went_and_measures_no_loss_twice(
    cluster: Fleet, coordinators: Coordinators, redis: Redis
) -> None:
    await coordinators.start()
    await cluster.open(*REPLICAS)
    await cluster.event("session_ended")
    for done in await cluster.events("round_done"):
        stages = from_words(done["stages"])
        assert set(stages) == {"configure", "clients", "aggregate", "check"}
        assert sum(stages.values()) <= float(done["seconds"]) + 0.005
        client, _, words = done["slowest"].partition(": ")
        assert client in REPLICAS
        assert {"train", "wait", "prepare", "other"} == set(from_words(words))
    first = await cluster.event("first_step")
    stages = from_words(first["stages"])
    assert set(stages) == {"opening", "queue", "prepare"}
    assert sum(stages.values()) == pytest.approx(float(first["seconds"]), abs=0.01)
    # the parent and the new version, then the new one only
    assert await redis.lrange("test:evaluated:r0", 0, -1) == [b"2", b"1"]


async def test_stored_data_is_prepared_before_any_session(
    cluster: Fleet, coordinators: Coordinators, redis: Redis
) -> None:
    await coordinators.start()
    event = {"kind": "data_stored", "replica": "r1", "adapter": "chat", "file": "a"}

    async def prepared() -> int:
        """Told until it is heard: a coordinator follows what happens after its start."""
        await redis.xadd(names.EVENTS, {**event, "replica": "r0", "ok": "0"})
        await redis.xadd(names.EVENTS, {**event, "replica": "nobody", "ok": "1"})
        await redis.xadd(names.EVENTS, {**event, "ok": "1"})
        return int(await redis.llen("test:prepared"))

    await cluster.until(prepared)
    assert set(await redis.lrange("test:prepared", 0, -1)) == {b"r1 chat 4 512"}


async def test_a_client_killed_in_its_round_is_left_out_and_the_round_goes_on(
    cluster: Fleet, coordinators: Coordinators
) -> None:
    await cluster.wrong("r2", local_round="die")
    await coordinators.start()
    await cluster.open(*REPLICAS)
    failed = await cluster.event("client_failed")
    assert failed["replica"] == "r2"
    assert "dead in mid-round" in failed["why"]
    done = await cluster.event("round_done")
    assert done["used"] == "r0,r1"
    left = await cluster.event("client_left")
    assert left["replica"] == "r2"


async def test_a_client_that_is_too_slow_is_left_out_and_its_late_update_is_never_used(
    cluster: Fleet, coordinators: Coordinators
) -> None:
    """flower#2515: a straggler beyond the deadline."""
    await cluster.wrong("r1", local_round="hang")
    await coordinators.start(round_seconds=2.0)
    await cluster.open(*REPLICAS)
    failed = await cluster.event("client_failed")
    assert (failed["replica"], failed["why"]) == (
        "r1",
        "did not hand over by the round's deadline",
    )
    done = await cluster.event("round_done")
    assert done["used"] == "r0,r2"
    await cluster.right("r1")
    done = await cluster.event("round_done", 2)
    assert done["used"] == "r0,r1,r2"


async def test_the_next_best_replica_aggregates_when_the_server_is_killed_at_it(
    cluster: Fleet, coordinators: Coordinators
) -> None:
    await cluster.wrong("r0", aggregate="die")
    await coordinators.start()
    await cluster.open(*REPLICAS)
    failed = await cluster.event("server_failed")
    assert failed["replica"] == "r0"
    done = await cluster.event("round_done")
    assert done["used"] == "r0,r1,r2"  # the dead server's own update had been uploaded
    current = await cluster.registry.current("chat")
    assert current is not None
    assert current.round >= 1


@pytest.mark.parametrize("moment", ["train", "aggregate"])
async def test_a_coordinator_takes_a_session_up_and_nothing_is_done_twice(
    cluster: Fleet, coordinators: Coordinators, redis: Redis, moment: str
) -> None:
    what = "local_round" if moment == "train" else "aggregate"
    for replica in REPLICAS:
        await cluster.wrong(replica, **{what: "hang"})
    predecessor = await coordinators.start()
    await cluster.open(*REPLICAS)
    key = "test:jobs" if moment == "train" else "test:aggregations"
    await cluster.until(lambda: redis.hlen(key))
    await coordinators.stop(predecessor)
    await coordinators.start()
    for replica in REPLICAS:
        await cluster.right(replica)
    await cluster.event("session_ended")
    jobs = {k.decode(): int(v) for k, v in (await redis.hgetall("test:jobs")).items()}
    assert set(jobs.values()) == {1}
    assert len(jobs) == 6  # three clients, two rounds
    made = {k.decode(): int(v) for k, v in (await redis.hgetall("test:aggregations")).items()}
    assert made == {"r1": 1, "r2": 1}
    done = await cluster.events("round_done")
    assert [d["version"] for d in done] == ["r1", "r2"]


async def test_a_killed_coordinator_process_is_replaced_by_its_standby(
    cluster: Fleet, redis: Redis
) -> None:
    """kill -9 in mid-round; the standby takes over when the lease expires."""
    environment = {
        **os.environ,
        "COLLM_REDIS_URL": cluster.url,
        "COLLM_DATA_DIR": str(cluster.data_dir),
        "COLLM_COORDINATOR_PORT": "0",
        "COLLM_COORDINATOR_TRAINING": json.dumps(TRAINING),
    }
    command = [sys.executable, "-m", "services.coordinator"]
    for replica in REPLICAS:
        await cluster.wrong(replica, local_round="hang")
    processes = [await asyncio.create_subprocess_exec(*command, env=environment) for _ in range(2)]
    try:
        await cluster.open(*REPLICAS)
        await cluster.until(lambda: redis.hlen("test:jobs"))
        holder = (await redis.get(names.lease("coordinator"))).decode().split(":")[1]
        os.kill(int(holder), signal.SIGKILL)
        for replica in REPLICAS:
            await cluster.right(replica)
        ended = await cluster.event("session_ended")
        assert ended["why"] == "2 rounds done"
        jobs = await redis.hgetall("test:jobs")
        assert set(jobs.values()) == {b"1"}
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def test_all_clients_without_examples_fail_the_round_and_the_adapter_stays(
    cluster: Fleet, coordinators: Coordinators
) -> None:
    """flower#7645: a model of NaN was handed out silently."""
    for replica in REPLICAS:
        await cluster.wrong(replica, examples=0)
    await coordinators.start()
    await cluster.open(*REPLICAS)
    failed = await cluster.event("round_failed")
    assert failed["why"] == "0 of 3 handed over"
    ended = await cluster.event("session_ended")
    assert "2 rounds in a row failed" in ended["why"]
    current = await cluster.registry.current("chat")
    assert current is not None
    assert current.version == "r0"
    assert failures(coordinators.meters) == {"quorum": 2.0, "aggregation": 0.0}


async def test_a_round_that_no_server_can_aggregate_is_counted_as_that(
    cluster: Fleet, coordinators: Coordinators
) -> None:
    for replica in REPLICAS:
        await cluster.wrong(replica, update="nan")
    await coordinators.start()
    assert failures(coordinators.meters) == {"quorum": 0.0, "aggregation": 0.0}
    await cluster.open(*REPLICAS)
    failed = await cluster.event("round_failed")
    assert "no usable update" in failed["why"]
    await cluster.event("session_ended")
    assert failures(coordinators.meters) == {"quorum": 0.0, "aggregation": 2.0}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("nan", "holds NaN or infinity"), ("shape", "shape of")],
)
async def test_a_spoilt_update_is_left_out_whole_and_named(
    cluster: Fleet, coordinators: Coordinators, fault: str, reason: str
) -> None:
    await cluster.wrong("r1", update=fault)
    await coordinators.start()
    await cluster.open(*REPLICAS)
    done = await cluster.event("round_done")
    assert done["used"] == "r0,r2"
    assert "r1:" in done["rejected"]
    assert reason in done["rejected"]


async def test_a_result_of_another_round_is_discarded(
    cluster: Fleet, coordinators: Coordinators
) -> None:
    await cluster.wrong("r1", round=77)
    await coordinators.start()
    await cluster.open(*REPLICAS)
    failed = await cluster.event("client_failed")
    assert failed["why"] == "its result is of round 77"
    assert (await cluster.event("round_done"))["used"] == "r0,r2"


async def test_a_job_that_raises_is_told_with_its_message(
    cluster: Fleet, coordinators: Coordinators
) -> None:
    await cluster.wrong("r1", local_round="raise")
    await coordinators.start()
    await cluster.open(*REPLICAS)
    failed = await cluster.event("client_failed")
    assert failed["why"] == "failed: RuntimeError: the data set is damaged"


async def test_a_version_that_is_worse_is_kept_and_marked_but_never_served(
    cluster: Fleet, coordinators: Coordinators
) -> None:
    for replica in REPLICAS:
        await cluster.wrong(replica, update="worse")
    await coordinators.start()
    await cluster.open(*REPLICAS)
    done = await cluster.event("round_done")
    assert done["promoted"] == "no"
    assert "beyond the margin" in done["why"]
    ended = await cluster.event("session_ended")
    assert ended["why"] == "held-out loss rose 2 times"
    current = await cluster.registry.current("chat")
    assert current is not None
    assert current.version == "r0"
    kept = await cluster.registry.version("chat", "r1")
    assert not kept.promoted


async def test_a_broken_process_group_falls_back_to_redis_and_the_round_goes_on(
    cluster: Fleet, coordinators: Coordinators
) -> None:
    await coordinators.start(exchange="group")
    await cluster.open(*REPLICAS)
    fallback = await cluster.event("exchange_fallback")
    assert "GroupBroken" in fallback["why"]
    done = await cluster.event("round_done")
    assert (done["used"], done["exchange"]) == ("r0,r1,r2", "redis")


async def test_replicas_join_and_leave_between_rounds(
    cluster: Fleet, coordinators: Coordinators, redis: Redis
) -> None:
    for replica in ("r0", "r1"):
        await cluster.wrong(replica, local_round="hang")
    await coordinators.start()
    session = await cluster.open("r0", "r1")
    await cluster.until(lambda: redis.hlen("test:jobs"))
    await sessions.wish(redis, session, "join:r2", "newly Idle")
    await sessions.wish(redis, session, "leave:r1", "converged")
    for replica in ("r0", "r1"):
        await cluster.right(replica)
    await cluster.event("session_ended")
    done = await cluster.events("round_done")
    assert [d["used"] for d in done] == ["r0,r1", "r0,r2"]
    assert await cluster.state("r1") == "serving"


async def test_the_server_leaving_hands_over_to_the_next(
    cluster: Fleet, coordinators: Coordinators, redis: Redis
) -> None:
    await cluster.wrong("r0", local_round="hang")
    await coordinators.start()
    session = await cluster.open(*REPLICAS)
    await cluster.until(lambda: redis.hlen("test:jobs"))
    await sessions.wish(redis, session, "leave:r0", "converged")
    await cluster.right("r0")
    began = await cluster.event("round_began", 2)
    assert began["server"] == "r1"


async def test_a_member_taken_back_to_serving_in_mid_round_is_left_out(
    cluster: Fleet, coordinators: Coordinators, redis: Redis
) -> None:
    await cluster.wrong("r2", local_round="hang")
    await coordinators.start()
    await cluster.open(*REPLICAS)
    await cluster.until(lambda: redis.hlen("test:jobs"))
    await move(redis, "r2", State.SERVING, by="test", why="load rose")
    failed = await cluster.event("client_failed")
    assert failed["why"] == "is serving in mid-round"
    assert (await cluster.event("round_done"))["used"] == "r0,r1"


async def test_load_that_rises_in_mid_round_rests_the_training_at_once(
    cluster: Fleet, coordinators: Coordinators, redis: Redis
) -> None:
    """B = 0 goes to the replica in mid-round, and the old B when the load is gone."""
    await cluster.wrong("r1", local_round="hang")
    await coordinators.start()
    await cluster.open(*REPLICAS)
    await cluster.until(lambda: redis.hlen("test:jobs"))

    async def configured() -> list[int | None]:
        bodies = [
            msgspec.msgpack.decode(fields[BODY])
            for _, fields in await redis.xrange(names.control("r1"))
            if fields[b"kind"] == b"configure"
        ]
        return [body.get("B") for body in bodies]

    async def tell(wanted: bool) -> None:
        command = SuspendTraining(replicas=("r1",), wanted=wanted)
        await redis.xadd(names.COORDINATOR_CONTROL, {BODY: encode(command)})

    async def last_is(value: int) -> bool:
        return (await configured())[-1] == value

    assert (await configured())[-1] == 4
    await tell(True)
    await cluster.until(lambda: last_is(0))
    await tell(False)
    await cluster.until(lambda: last_is(4))
    await cluster.right("r1")
    await cluster.event("session_ended")
    assert await redis.xlen(names.COORDINATOR_CONTROL) == 0


async def test_a_suspended_client_takes_no_part_in_the_next_round(
    cluster: Fleet, coordinators: Coordinators, redis: Redis
) -> None:
    await coordinators.start()
    command = SuspendTraining(replicas=("r1",), wanted=True)
    await redis.xadd(names.COORDINATOR_CONTROL, {BODY: encode(command)})
    await cluster.until(lambda: _drained(redis))
    await cluster.open(*REPLICAS)
    assert (await cluster.event("round_done"))["used"] == "r0,r2"


async def _drained(redis: Redis) -> bool:
    return int(await redis.xlen(names.COORDINATOR_CONTROL)) == 0


async def test_a_paused_session_goes_on_where_it_stood_and_a_stopped_one_ends(
    cluster: Fleet, coordinators: Coordinators, redis: Redis
) -> None:
    await coordinators.start()
    session = await cluster.open(*REPLICAS)
    await sessions.wish(redis, session, "pause", "an operator")
    await cluster.event("session_paused")
    rounds = len(await cluster.events("round_began"))
    await sessions.unwish(redis, session, "pause")
    await cluster.event("round_began", rounds + 1)
    await sessions.wish(redis, session, "stop", "cancelled by its owner")
    ended = await cluster.event("session_ended")
    assert ended["why"] in ("cancelled by its owner", "2 rounds done")
    for replica in REPLICAS:
        assert await cluster.state(replica) == "serving"


async def test_one_replica_alone_trains_when_the_launcher_says_so(
    cluster: Fleet, coordinators: Coordinators
) -> None:
    await coordinators.start()
    await cluster.open("r1", least=1)
    ended = await cluster.event("session_ended")
    assert ended["why"] == "2 rounds done"
    assert (await cluster.event("round_done"))["used"] == "r1"


async def test_too_few_members_end_a_session(
    cluster: Fleet, coordinators: Coordinators, redis: Redis
) -> None:
    await move(redis, "r1", State.SERVING, by="test", why="promoted by load")
    await coordinators.start()
    await cluster.open("r0", "r1")
    ended = await cluster.event("session_ended")
    assert ended["why"] == "1 clients left, 2 needed"
    assert await cluster.state("r0") == "serving"


async def test_unusable_training_options_end_the_session_with_the_field(
    cluster: Fleet, coordinators: Coordinators
) -> None:
    await cluster.registry.register("chat", base="m", rank=4)
    await cluster.registry.set_training("chat", {"strategy": "fedfoo"})
    await coordinators.start()
    await cluster.open(*REPLICAS)
    ended = await cluster.event("session_ended")
    assert "fedfoo" in ended["why"]


async def test_an_adapter_has_one_session_at_a_time(cluster: Fleet) -> None:
    first = await cluster.open("r0", "r1")
    assert await cluster.open("r1", "r2") == first


async def test_a_rollback_in_mid_round_is_not_overrun_by_its_result(
    cluster: Fleet, coordinators: Coordinators, redis: Redis
) -> None:
    await coordinators.start()
    await cluster.open(*REPLICAS)
    await cluster.event("round_done")
    for replica in REPLICAS:
        await cluster.wrong(replica, local_round="hang")
    began = await cluster.event("round_began", 2)
    assert began["parent"] == "r1"
    await cluster.registry.rollback("chat", "r0", why="operator")
    for replica in REPLICAS:
        await cluster.right(replica)
    done = await cluster.event("round_done", 2)
    assert done["promoted"] == "no"
    current = await cluster.registry.current("chat")
    assert current is not None
    assert current.version == "r0"


async def test_a_former_coordinator_can_write_no_more(
    cluster: Fleet, coordinators: Coordinators, redis: Redis
) -> None:
    """It was stopped for longer than its lease and wakes up beside its successor."""
    for replica in REPLICAS:
        await cluster.wrong(replica, local_round="hang")
    former = await coordinators.start()
    await cluster.open(*REPLICAS)
    await cluster.until(lambda: redis.hlen("test:jobs"))
    await redis.delete(names.lease("coordinator"))
    await coordinators.start()
    for replica in REPLICAS:
        await cluster.right(replica)
    await cluster.event("session_ended")
    await asyncio.wait({former}, timeout=10)
    assert former.done()
    coordinators.forget(former)
    error = former.exception()
    assert error is not None
    assert is_fenced(first(error))
    assert [d["version"] for d in await cluster.events("round_done")] == ["r1", "r2"]
