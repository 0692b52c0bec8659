"""``collm data`` and ``collm adapters`` against a real Redis, with a stand-in for the replica."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from collm.cli import build
from collm.redis_server import RedisServer
from shared import adapter_files, data_homes, names
from shared.adapters import AdapterRegistry, AdapterVersion
from shared.messages import BODY, DeleteData, LoadAdapter, StoreData, decode_any
from shared.records import ReplicaRecord


@pytest.fixture
async def replicas(redis: Redis, tmp_path: Path) -> AsyncIterator[list[str]]:
    """Two replicas that obey what comes on their control streams about data."""
    found = ["replica-0", "replica-1"]

    async def obey() -> None:
        while True:
            for name in found:
                for entry, fields in await redis.xrange(names.control(name)):
                    command = decode_any(fields[BODY])
                    if isinstance(command, StoreData | DeleteData):
                        answer = await data_homes.obey(redis, tmp_path, name, command)
                        await redis.xadd(names.EVENTS, answer)
                        await redis.xdel(names.control(name), entry)
            await asyncio.sleep(0.02)

    for name in found:
        record = ReplicaRecord(id=name, model="m", state="serving")
        await redis.hset(names.replica(name), mapping=record.to_hash())
        await redis.sadd(names.REPLICAS, name)
    task = asyncio.create_task(obey())
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Shell:
    def __init__(self, url: str, data_dir: Path) -> None:
        self._where = ["--redis", url, "--data-dir", str(data_dir)]

    async def __call__(self, *arguments: str) -> tuple[int, str]:
        command = [*arguments, *self._where]
        found = await asyncio.to_thread(CliRunner().invoke, build(), command)
        return found.exit_code, " ".join(found.output.split())


@pytest.fixture
def shell(redis_server: RedisServer, tmp_path: Path) -> Shell:
    return Shell(redis_server.url, tmp_path)


def chats(path: Path, count: int) -> Path:
    line = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path.write_text("".join(json.dumps({**line, "id": i}) + "\n" for i in range(count)))
    return path


async def test_data_is_added_listed_and_removed(
    shell: Shell, replicas: list[str], tmp_path: Path
) -> None:
    file = chats(tmp_path / "mine.jsonl", 6)
    code, text = await shell("data", "add", str(file), "--adapter", "chat")
    assert (code, "6 of 6 samples for chat on replica-" in text) == (0, True)
    code, text = await shell(
        "data", "add", str(chats(tmp_path / "two.jsonl", 4)), "--adapter", "chat", "--shard", "2"
    )
    assert code == 0
    assert text.count("2 of 4 samples for chat") == 2
    code, text = await shell("data", "list", "--json")
    held = json.loads(text)
    assert sum(data["chat"] for data in held.values()) == 10
    code, text = await shell("data", "remove", "--adapter", "chat")
    assert (code, "3 files deleted" in text) == (0, True)
    assert json.loads((await shell("data", "list", "--json"))[1]) == {}
    assert not list((tmp_path / "replicas").rglob("*.jsonl"))


async def test_bad_data_names_file_and_line(
    shell: Shell, replicas: list[str], tmp_path: Path
) -> None:
    file = chats(tmp_path / "mine.jsonl", 2)
    file.write_text(file.read_text() + "{}\n")
    code, text = await shell("data", "add", str(file), "--adapter", "chat")
    assert code == 1
    assert "mine.jsonl:3" in text
    code, text = await shell(
        "data", "add", str(chats(file, 2)), "--adapter", "chat", "--shard", "9"
    )
    assert code == 1
    assert "9 replicas wanted, 2 are there" in text


async def test_adapters_are_shown_rolled_back_and_exported(
    shell: Shell, replicas: list[str], redis: Redis, tmp_path: Path
) -> None:
    registry = AdapterRegistry(redis, tmp_path)
    await registry.register("chat", base="m", rank=8)
    for i in range(3):
        with adapter_files.staged(tmp_path, "chat", f"r{i}") as folder:
            (folder / adapter_files.TENSOR_FILE).write_text(f"version {i}")
        entry = AdapterVersion(
            version=f"r{i}",
            path=str(registry.folder("chat", f"r{i}")),
            parent=f"r{i - 1}" if i else "",
            round=i,
            quality=1.0 + i,
        )
        await registry.publish("chat", entry)
    await redis.hset(names.replica("replica-0"), "adapters", '{"chat":"r2"}')
    code, text = await shell("adapters", "list")
    assert (code, "r2" in text) == (0, True)
    code, text = await shell("adapters", "show", "chat")
    assert "replica-0 serves r2" in text
    code, text = await shell("adapters", "rollback", "chat")
    assert "r1 is current (Q 2.000)" in text
    [(_, fields)] = await redis.xrange(names.control("replica-0"))
    command = decode_any(fields[BODY])
    assert isinstance(command, LoadAdapter)
    assert (command.name, command.version) == ("chat", "r1")
    code, text = await shell("adapters", "export", "chat", str(tmp_path / "out"))
    assert (tmp_path / "out" / adapter_files.TENSOR_FILE).read_text() == "version 1"
    assert (await shell("adapters", "export", "chat", str(tmp_path / "out")))[0] == 1
    assert (await shell("adapters", "show", "nobody"))[0] == 1


async def test_training_options_are_checked_before_they_are_kept(
    shell: Shell, redis: Redis, tmp_path: Path
) -> None:
    code, text = await shell("adapters", "options", "chat", "strategy=fedfoo", "--model", "m")
    assert (code, "fedfoo" in text) == (1, True)
    code, _ = await shell("adapters", "options", "chat", "strategy=ffa", "--model", "m")
    assert code == 0
    adapter = await AdapterRegistry(redis, tmp_path).get("chat")
    assert adapter is not None
    assert adapter.training == {"strategy": "ffa"}
