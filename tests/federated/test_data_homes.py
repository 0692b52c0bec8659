"""Training data: stored whole where it belongs, counted, deleted, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest
from redis.asyncio import Redis

from shared import data_homes, names, training_data
from shared.adapter_files import BadName
from shared.messages import BODY, DeleteData, StoreData, decode_any


def chats(count: int) -> bytes:
    line = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    return b"".join(json.dumps({**line, "id": i}).encode() + b"\n" for i in range(count))


def test_a_file_is_stored_counted_and_deleted(tmp_path: Path) -> None:
    assert data_homes.store(tmp_path, "r0", "chat", "first", chats(5)) == 5
    assert data_homes.store(tmp_path, "r0", "chat", "second", chats(3)) == 3
    assert data_homes.count(tmp_path, "r0") == {"chat": 8}
    assert data_homes.count(tmp_path, "r1") == {}
    assert data_homes.delete(tmp_path, "r0", "chat", "first") == 1
    assert data_homes.count(tmp_path, "r0") == {"chat": 3}
    assert data_homes.delete(tmp_path, "r0", "chat") == 1
    assert data_homes.count(tmp_path, "r0") == {}
    assert not data_homes.folder(tmp_path, "r0", "chat").exists()


def test_what_is_held_out_lies_apart_is_not_counted_and_goes_with_the_rest(tmp_path: Path) -> None:
    data_homes.store(tmp_path, "r0", "chat", "first", chats(5))
    assert data_homes.store(tmp_path, "r0", "chat", "judge", chats(2), heldout=True) == 2
    assert data_homes.count(tmp_path, "r0") == {"chat": 5}
    assert [f.stem for f in data_homes.files(tmp_path, "r0", "chat")] == ["first"]
    assert [f.stem for f in data_homes.files(tmp_path, "r0", "chat", heldout=True)] == ["judge"]
    assert data_homes.delete(tmp_path, "r0", "chat", "judge") == 1
    data_homes.store(tmp_path, "r0", "chat", "judge", chats(2), heldout=True)
    assert data_homes.delete(tmp_path, "r0", "chat") == 2
    assert not data_homes.folder(tmp_path, "r0", "chat").exists()


def test_a_json_array_is_dealt_out_by_sample(tmp_path: Path) -> None:
    whole = json.dumps([json.loads(line) for line in chats(7).splitlines()], indent=1).encode()
    parts = list(data_homes.shards(b"\xef\xbb\xbf" + whole, 2))
    stored = [
        data_homes.store(tmp_path, f"r{i}", "chat", "f", part, ".json")
        for i, part in enumerate(parts)
    ]
    assert stored == [4, 3]


def test_a_damaged_file_is_refused_with_its_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(training_data.DataError, match=r"first\.jsonl:3"):
        data_homes.store(tmp_path, "r0", "chat", "first", chats(2) + b'{"messages": 1}\n')
    assert list(data_homes.folder(tmp_path, "r0", "chat").iterdir()) == []


@pytest.mark.parametrize(("adapter", "file"), [("../x", "f"), ("a", "../f"), ("a", "/etc/f")])
def test_names_cannot_leave_the_data_folder(tmp_path: Path, adapter: str, file: str) -> None:
    with pytest.raises(BadName):
        data_homes.store(tmp_path, "r0", adapter, file, chats(1))


def test_shards_keep_every_sample_once() -> None:
    parts = list(data_homes.shards(chats(10), 3))
    ids = [json.loads(line)["id"] for part in parts for line in part.splitlines()]
    assert sorted(ids) == list(range(10))
    assert [len(p.splitlines()) for p in parts] == [4, 3, 3]


def test_a_home_moves_only_when_its_replica_goes() -> None:
    replicas = [f"r{i}" for i in range(6)]
    before = {f"k{i}": data_homes.choose(replicas, f"k{i}")[0] for i in range(200)}
    assert len(set(before.values())) == 6
    after = {k: data_homes.choose(replicas[:-1], k)[0] for k in before}
    assert all(after[k] == home for k, home in before.items() if home != "r5")
    assert len(set(data_homes.choose(replicas, "k", 3))) == 3
    with pytest.raises(data_homes.NoHome):
        data_homes.choose([], "k")


async def obey_all(redis: Redis, data_dir: Path, replica: str) -> None:
    """What the replica's serving loop does with its control stream."""
    for entry, fields in await redis.xrange(names.control(replica)):
        command = decode_any(fields[BODY])
        assert isinstance(command, StoreData | DeleteData)
        answer = await data_homes.obey(redis, data_dir, replica, command)
        await redis.xadd(names.EVENTS, answer)
        await redis.xdel(names.control(replica), entry)


async def test_a_file_travels_to_its_replica_and_the_answer_comes_back(
    redis: Redis, tmp_path: Path
) -> None:
    ticket = await data_homes.send(redis, "r0", "chat", "first", chats(4))
    bad = await data_homes.send(redis, "r0", "chat", "second", b"nonsense\n")
    await obey_all(redis, tmp_path, "r0")
    found = await data_homes.answers(redis, [ticket, bad], "0", 5.0)
    assert (found[ticket]["ok"], found[ticket]["samples"]) == ("1", "4")
    assert found[bad]["ok"] == "0"
    assert "second.jsonl:1" in found[bad]["why"]
    record = await redis.hget(names.replica("r0"), "data")
    assert orjson.loads(record or b"{}") == {"chat": 4}
    assert await redis.exists(names.blob(ticket)) == 0  # the bytes do not linger in Redis
    gone = await data_homes.send_delete(redis, "r0", "chat")
    await obey_all(redis, tmp_path, "r0")
    answer = await data_homes.answers(redis, [gone], "0", 5.0)
    assert answer[gone]["files"] == "1"
    assert orjson.loads(await redis.hget(names.replica("r0"), "data") or b"") == {}


async def test_a_replica_that_does_not_answer_is_waited_for_in_bounded_time(redis: Redis) -> None:
    ticket = await data_homes.send(redis, "r9", "chat", "first", chats(1))
    assert await data_homes.answers(redis, [ticket], "0", 0.3) == {}
