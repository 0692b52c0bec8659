"""The holder of weights as the parent sees it, with a holder that holds nothing (no torch)."""

from __future__ import annotations

import asyncio
import os
from multiprocessing.connection import Connection

import orjson
import psutil
import pytest

from services.replica import pipes, weights_child
from services.replica.children import GaveUp
from services.replica.settings import ReplicaSettings
from services.replica.weights_child import WeightsChild


def holds(config: str, pipe: Connection) -> None:
    """Answers like a holder; its handle is its own process id."""
    pipes.send(pipe, {"held": "cpu"})
    while "stop" not in (message := orjson.loads(pipe.recv_bytes())):
        handle = {"pid": os.getpid(), "number": message["share"]}
        pipes.send(pipe, {"shared": message["share"], "handle": handle})


def has_nothing(config: str, pipe: Connection) -> None:
    pipes.send(pipe, {"mapped": True})


def cannot(config: str, pipe: Connection) -> None:
    pipes.send(pipe, {"fatal": "the weights cannot be loaded: no such file"})
    raise SystemExit(1)


def settings() -> ReplicaSettings:
    return ReplicaSettings.model_validate({"model_path": "m", "device": "cuda:0", "restarts": 1})


async def test_every_user_gets_a_handle_of_its_own_and_a_new_holder_tells_its_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights_child, "run", holds)
    lost = asyncio.Event()
    child = WeightsChild(settings(), lost.set)
    keeper = asyncio.create_task(child.keep())
    async with asyncio.timeout(60):
        first, second = await asyncio.gather(child.share(), child.share())
        assert first is not None
        assert second is not None
        assert first["pid"] == second["pid"]
        assert first["number"] != second["number"]
        assert not lost.is_set()
        psutil.Process(first["pid"]).kill()
        # Asked while it dies: answered by the next one.
        third = await child.share()
        assert third is not None
        assert third["pid"] != first["pid"]
        assert lost.is_set()
        keeper.cancel()
        await child.stop()
    assert not psutil.pid_exists(third["pid"])


async def test_a_holder_that_finds_no_gpu_ends_and_everybody_maps_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights_child, "run", has_nothing)
    child = WeightsChild(settings(), lambda: pytest.fail("nothing was held"))
    async with asyncio.timeout(60):
        keeper = asyncio.create_task(child.keep())
        assert await child.share() is None
        await keeper


async def test_weights_that_cannot_be_loaded_end_the_replica_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights_child, "run", cannot)
    child = WeightsChild(settings(), lambda: None)
    async with asyncio.timeout(60):
        keeper = asyncio.create_task(child.keep())
        with pytest.raises(GaveUp, match="no such file"):
            await child.share()
        with pytest.raises(GaveUp, match="no such file"):
            await keeper
