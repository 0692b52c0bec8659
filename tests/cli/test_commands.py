"""Commands that look at a running system, against a real Redis."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from collm import cluster, waiting
from collm.cli import build
from collm.commands import data, replicas
from collm.redis_server import RedisServer
from shared import names
from shared.dead_letters import bury
from shared.records import ReplicaRecord
from shared.replica_state import State, event, move

run = CliRunner()


def _collm(*arguments: str) -> tuple[int, str, str]:
    with ThreadPoolExecutor(1) as thread:  # commands run an event loop of their own
        result = thread.submit(run.invoke, build(), arguments).result()
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    return redis_server.url


async def _replica(redis: Redis, name: str, **fields: object) -> None:
    record = ReplicaRecord(id=name, model="m", b=4, adapters={"law": "v2"})
    await redis.sadd(names.REPLICAS, name)
    await redis.hset(names.replica(name), mapping=record.to_hash("id", "model", "b", "adapters"))
    await move(redis, name, State.STARTING, by="test", why="new")


async def test_queues_counts_entries_and_pending_ones(redis: Redis, url: str) -> None:
    stream = names.requests("m")
    await redis.xgroup_create(stream, names.GROUP_DISPATCHER, id="0", mkstream=True)
    for i in range(3):
        await redis.xadd(stream, {"id": str(i)})
    await redis.xreadgroup(names.GROUP_DISPATCHER, "c", {stream: ">"}, count=2)
    await redis.xadd(names.METRICS, {"kind": "step"})
    await _replica(redis, "replica-10")
    await _replica(redis, "replica-9")
    code, out, _ = _collm("queues", "--json", "--redis", url)
    found = json.loads(out)
    assert code == 0
    assert found["streams"] == {stream: {"length": 3, "pending": 2}}, "logs are not work"
    assert [r["id"] for r in found["replicas"]] == ["replica-9", "replica-10"]
    assert found["replicas"][0] == {
        "id": "replica-9",
        "state": "starting",
        "model": "m",
        "b": 4,
        "in_flight": 0,
        "adapters": {"law": "v2"},
    }


async def test_queues_in_words_shows_the_same(redis: Redis, url: str) -> None:
    await redis.xadd(names.requests("m"), {"id": "1"})
    await _replica(redis, "replica-0")
    code, out, _ = _collm("queues", "--redis", url)
    assert code == 0
    assert names.requests("m") in out
    assert "law@v2" in out


async def test_a_damaged_record_does_not_hide_the_others(redis: Redis) -> None:
    await _replica(redis, "replica-0")
    await redis.sadd(names.REPLICAS, "replica-1")
    await redis.hset(names.replica("replica-1"), "b", "many")
    states = {r.id: r.state for r in await cluster.replicas(redis)}
    assert states == {"replica-0": "starting", "replica-1": "damaged"}


async def test_a_living_replica_is_not_forgotten(redis: Redis, url: str) -> None:
    await _replica(redis, "replica-0")
    await redis.set(names.replica_alive("replica-0"), "x", px=60_000)
    code, _, err = _collm("forget", "replica-0", "--redis", url)
    assert code == 1
    assert "is alive" in err
    await redis.delete(names.replica_alive("replica-0"))
    assert _collm("forget", "replica-0", "--redis", url)[0] == 0
    assert await redis.keys("collm:replica*") == []


async def test_a_replica_with_undelivered_batches_is_not_forgotten(redis: Redis, url: str) -> None:
    await _replica(redis, "replica-0")
    await redis.xadd(names.batches("replica-0"), {"id": "b"})
    code, _, err = _collm("forget", "replica-0", "--redis", url)
    assert code == 1
    assert "still holds 1 batches" in err


async def test_events_shows_the_last_of_a_kind_oldest_first(redis: Redis, url: str) -> None:
    for i in range(5):
        await event(redis, "round", number=i)
        await event(redis, "noise", number=i)
    code, out, _ = _collm("events", "-n", "2", "--kind", "round", "--json", "--redis", url)
    assert code == 0
    assert [json.loads(line)["number"] for line in out.splitlines()] == ["3", "4"]


async def test_events_since_a_moment_are_shown_whole_with_date_and_zone(
    redis: Redis, url: str
) -> None:
    await redis.xadd(names.EVENTS, {"kind": "old"}, id="1767225600000-0")  # 2026-01-01, midnight
    for i in range(30):
        await event(redis, "new", number=i)
    code, out, _ = _collm("events", "--since", "1h", "--redis", url)
    assert (code, len(out.splitlines())) == (0, 30)
    code, out, _ = _collm("events", "--since", "2026-01-01T00:00Z", "--utc", "--redis", url)
    assert code == 0
    assert out.splitlines()[0].startswith("2026-01-01 00:00:00.000Z old")
    assert len(out.splitlines()) == 31
    assert "Z new" in out.splitlines()[-1]
    _, out, _ = _collm("events", "--since", "1h", "-n", "2", "--json", "--redis", url)
    assert [json.loads(line)["number"] for line in out.splitlines()] == ["28", "29"]
    code, _, err = _collm("events", "--since", "noon", "--redis", url)
    assert code == 1
    assert "--since: 'noon' is no moment" in err


async def test_a_drain_says_what_it_waits_for(
    redis: Redis, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "TELL_SECONDS", 0.05)
    await _replica(redis, "replica-0")
    await redis.hset(names.replica("replica-0"), "in_flight", "3")
    code, _, err = _collm("drain", "replica-0", "--timeout", "0.4", "--redis", url)
    assert code == 1
    assert "waiting for 0 s: replica-0 is starting, 3 in flight" in err
    assert "replica-0 is still starting after 0 s" in err


async def test_data_commands_say_which_replica_they_wait_for(
    redis: Redis, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "TELL_SECONDS", 0.05)
    monkeypatch.setattr(data, "WAIT", 0.4)
    await _replica(redis, "replica-0")
    await redis.hset(names.replica("replica-0"), "data", '{"law": 5}')
    code, _, err = _collm("data", "remove", "--adapter", "law", "--redis", url)
    assert code == 1
    assert "waiting for 0 s: replica-0 is starting, 0 in flight" in err
    assert "replica-0: no answer within" in err


async def test_what_is_not_drained_is_not_undrained(redis: Redis, url: str) -> None:
    assert "no replica 'replica-0'" in _collm("undrain", "replica-0", "--redis", url)[2]
    await _replica(redis, "replica-0")
    code, _, err = _collm("undrain", "replica-0", "--redis", url)
    assert code == 1
    assert "replica-0 is starting; only one that is stopped or dead" in err


async def test_an_undrain_that_nobody_answers_says_so_and_leaves_no_wish(
    redis: Redis, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "TAKE_SECONDS", 1)
    await _replica(redis, "replica-0")
    await move(redis, "replica-0", State.DEAD, by="test", why="gone")
    code, _, err = _collm("undrain", "replica-0", "--redis", url)
    assert code == 1
    assert "no `collm up` that runs it answers" in err
    assert await redis.exists(names.replica_wanted("replica-0")) == 0


async def test_a_dead_letter_goes_back_as_it_was(redis: Redis, url: str) -> None:
    stream = names.requests("m")
    await redis.xgroup_create(stream, "g", id="0", mkstream=True)
    entry = await redis.xadd(stream, {"id": "1", "body": b"\xff\x00"})
    await bury(redis, stream, "g", entry, {b"id": b"1", b"body": b"\xff\x00"}, "odd", by="test")
    listed = json.loads(_collm("dead-letters", "list", "--json", "--redis", url)[1])
    assert (listed["stream"], listed["reason"], listed["by"]) == (stream, "odd", "test")
    code, shown, _ = _collm("dead-letters", "show", listed["id"], "--redis", url)
    assert code == 0
    assert "field:body: 0xff00" in shown
    assert _collm("dead-letters", "requeue", listed["id"], "--redis", url)[0] == 0
    assert [fields for _, fields in await redis.xrange(stream)] == [
        {b"id": b"1", b"body": b"\xff\x00"}
    ]
    assert await redis.xlen(names.DEAD_LETTERS) == 0


async def test_a_dead_letter_that_does_not_exist_is_said_so(redis: Redis, url: str) -> None:
    code, _, err = _collm("dead-letters", "requeue", "1-1", "--redis", url)
    assert code == 1
    assert "no dead letter 1-1" in err


def test_without_a_running_system_commands_say_what_to_do(tmp_path: Path) -> None:
    code, _, err = _collm("queues", "--data-dir", str(tmp_path))
    assert code == 1
    assert "start `collm up` or give --redis" in err


def test_a_redis_that_does_not_answer_is_one_line_not_a_traceback() -> None:
    code, _, err = _collm("queues", "--redis", "redis://127.0.0.1:1/0")
    assert code == 1
    assert err.startswith("collm: Redis:")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "./nowhere"), "no such folder"),
        (("--model", "x:0"), "at least one replica"),
        (("--engine", "magic"), "--engine: engine"),
        (("--lora-modules", "law"), "NAME=PATH expected"),
        (("--profile", "warp"), "no profile 'warp'"),
        (("--port", "99999"), "--port: port"),
        (("--host", "0.0.0.0"), "--host 0.0.0.0: others can reach that address"),
        (("--host", "10.255.0.1"), "COLLM_GATEWAY_ALLOW_OPEN=true"),
    ],
)
def test_bad_options_end_in_one_clear_message(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    code, out, err = _collm("up", "--data-dir", str(tmp_path), "--port", "0", *arguments)
    assert code == 1
    assert message in err
    assert out == ""
