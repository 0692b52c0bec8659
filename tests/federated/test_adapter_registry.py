"""The adapter registry, on a real Redis and a real disk."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from redis.asyncio import Redis

from shared import adapter_files, names
from shared.adapters import AdapterRegistry, AdapterVersion, Conflict, Unknown, replicas_serving


@pytest.fixture
def registry(redis: Redis, tmp_path: Path) -> AdapterRegistry:
    return AdapterRegistry(redis, tmp_path)


def write(registry: AdapterRegistry, name: str, version: str, text: str = "tensors") -> Path:
    with adapter_files.staged(registry.data_dir, name, version) as folder:
        (folder / adapter_files.TENSOR_FILE).write_text(text)
    return registry.folder(name, version)


async def publish(
    registry: AdapterRegistry, version: str, parent: str = "", **fields: object
) -> None:
    path = write(registry, "chat", version)
    entry = AdapterVersion(version=version, path=str(path), parent=parent, **fields)  # type: ignore[arg-type]
    assert await registry.publish("chat", entry)


async def test_a_published_version_is_current_and_carries_its_quality(
    registry: AdapterRegistry,
) -> None:
    assert await registry.register("chat", base="m", rank=8, tenant="alice")
    assert await registry.current("chat") is None
    await publish(registry, "r0", round=0)
    await publish(registry, "r1", "r0", round=1, quality=1.5)
    adapter, current = await registry.get("chat"), await registry.current("chat")
    assert adapter is not None
    assert (adapter.current, adapter.quality, adapter.rank) == ("r1", 1.5, 8)
    assert current is not None
    assert current.parent == "r0"
    assert [v.version for v in await registry.versions("chat")] == ["r0", "r1"]


async def test_publishing_the_same_version_twice_changes_nothing(registry: AdapterRegistry) -> None:
    await registry.register("chat", base="m", rank=8)
    await publish(registry, "r1", quality=1.5)
    again = AdapterVersion(version="r1", path="elsewhere", quality=9.0)
    assert not await registry.publish("chat", again)
    current = await registry.current("chat")
    assert current is not None
    assert (current.quality, current.path) == (1.5, str(registry.folder("chat", "r1")))


async def test_of_many_concurrent_publishers_with_one_expectation_one_wins(
    registry: AdapterRegistry,
) -> None:
    await registry.register("chat", base="m", rank=8)
    entries = [AdapterVersion(version=f"v{i}", path="") for i in range(20)]
    results = await asyncio.gather(
        *(registry.publish("chat", e, expected="") for e in entries), return_exceptions=True
    )
    assert [r for r in results if r is True] == [True]
    assert sum(isinstance(r, Conflict) for r in results) == 19


async def test_a_version_that_is_not_promoted_is_kept_and_marked(registry: AdapterRegistry) -> None:
    await registry.register("chat", base="m", rank=8)
    await publish(registry, "r1")
    worse = AdapterVersion(version="r2", path="", parent="r1", note="held-out loss rose")
    assert await registry.publish("chat", worse, promote=False)
    current = await registry.current("chat")
    assert current is not None
    assert current.version == "r1"
    kept = await registry.version("chat", "r2")
    assert not kept.promoted
    assert kept.note == "held-out loss rose"


async def test_rollback_brings_the_old_version_and_its_quality_back(
    registry: AdapterRegistry, redis: Redis
) -> None:
    await registry.register("chat", base="m", rank=8)
    await publish(registry, "r1", quality=1.25)
    await publish(registry, "r2", "r1", quality=2.0)
    back = await registry.rollback("chat", why="operator")
    adapter = await registry.get("chat")
    assert adapter is not None
    assert (back.version, adapter.current, adapter.quality) == ("r1", "r1", 1.25)
    with pytest.raises(Conflict, match="no earlier version"):
        await registry.rollback("chat")
    with pytest.raises(Unknown, match="r9"):
        await registry.rollback("chat", "r9")
    kinds = [fields[b"kind"] for _, fields in await redis.xrange(names.EVENTS)]
    assert kinds[-1] == b"adapter_rollback"


async def test_a_name_cannot_be_taken_by_another_base_or_tenant(registry: AdapterRegistry) -> None:
    await registry.register("chat", base="m", rank=8, tenant="alice")
    assert not await registry.register("chat", base="m", rank=8, tenant="alice")
    with pytest.raises(Conflict, match="tenant"):
        await registry.register("chat", base="m", rank=8, tenant="bob")
    with pytest.raises(Conflict, match="base model 'm'"):
        await registry.register("chat", base="other", rank=8, tenant="alice")


async def test_a_tenant_sees_its_own_adapters_and_everybodys(registry: AdapterRegistry) -> None:
    await registry.register("a", base="m", rank=8, tenant="alice")
    await registry.register("b", base="m", rank=8, tenant="bob")
    await registry.register("c", base="n", rank=8)
    assert [a.name for a in await registry.all(tenant="alice")] == ["a", "c"]
    assert [a.name for a in await registry.all(base="m")] == ["a", "b"]


async def test_forgetting_removes_files_and_keys(registry: AdapterRegistry, redis: Redis) -> None:
    await registry.register("chat", base="m", rank=8)
    await publish(registry, "r1")
    await publish(registry, "r2", "r1")
    with pytest.raises(Conflict, match="current"):
        await registry.forget_version("chat", "r2")
    assert await registry.forget_version("chat", "r1")
    assert not registry.folder("chat", "r1").exists()
    assert await registry.forget("chat")
    assert not await registry.forget("chat")
    assert not (registry.data_dir / "adapters" / "chat").exists()
    assert await redis.keys("collm:adapter*") == []


async def test_retention_keeps_current_parent_first_and_what_is_in_use(
    registry: AdapterRegistry,
) -> None:
    await registry.register("chat", base="m", rank=8)
    for i in range(8):
        await publish(registry, f"r{i}", f"r{i - 1}" if i else "", round=i, created=float(i + 1))
    gone = await registry.prune("chat", 2, in_use=frozenset({"r2"}))
    assert gone == ["r1", "r3", "r4", "r5"]
    assert [v.version for v in await registry.versions("chat")] == ["r0", "r2", "r6", "r7"]


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "../x", "a\x00", "-a", ".hidden", "x" * 129, "a..b", "x:versions"]
)
async def test_names_that_could_become_paths_or_other_keys_are_refused(
    registry: AdapterRegistry, name: str
) -> None:
    with pytest.raises(adapter_files.BadName):
        await registry.register(name, base="m", rank=8)
    with pytest.raises(adapter_files.BadName):
        registry.folder("chat", name)


def test_a_version_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail() -> None:
        with adapter_files.staged(tmp_path, "chat", "r1") as folder:
            (folder / "half").write_text("x")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        fail()
    assert list((tmp_path / "adapters" / "chat").iterdir()) == []
    for text in ("first", "second"):
        with adapter_files.staged(tmp_path, "chat", "r1") as folder:
            (folder / "whole").write_text(text)
    place = adapter_files.folder(tmp_path, "chat", "r1")
    assert (place / "whole").read_text() == "first"
    assert [p.name for p in place.parent.iterdir()] == ["r1"]


def test_paths_from_outside_are_confined(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "in").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path)
    assert adapter_files.confined(root, "in") == (root / "in").resolve()
    for path in ("..", "../x", "link", "/etc", "in/../../x"):
        with pytest.raises(adapter_files.BadPath):
            adapter_files.confined(root, path)


def test_a_folder_that_is_no_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(adapter_files.BadFolder, match=r"adapter_config\.json"):
        adapter_files.read_card(tmp_path)
    good = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    config = tmp_path / adapter_files.CONFIG_FILE
    for change, word in (({"r": 9999}, "r:"), ({"lora_alpha": 0}, "lora_alpha"), ({}, "tensors")):
        config.write_text(json.dumps({**good, **change}))
        if change:
            with pytest.raises(adapter_files.BadFolder, match=word):
                adapter_files.read_card(tmp_path)
    with pytest.raises(adapter_files.BadFolder, match="safetensors"):
        adapter_files.read_card(tmp_path)
    (tmp_path / adapter_files.TENSOR_FILE).write_bytes(b"")
    card = adapter_files.read_card(tmp_path)
    assert (card.rank, card.lora_alpha) == (8, 16.0)


async def test_residency_is_read_from_the_replica_records(redis: Redis) -> None:
    await redis.sadd(names.REPLICAS, "r0", "r1")
    await redis.hset(names.replica("r0"), mapping={"adapters": '{"chat":"r3"}'})
    await redis.hset(names.replica("r1"), mapping={"adapters": "{}"})
    assert await replicas_serving(redis, "chat") == {"r0": "r3"}
