"""Tensors over a real Gloo group of real processes, with members that die or never come."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import redis as sync_redis
import torch.distributed as dist
from redis.asyncio import Redis

from collm.redis_server import RedisServer
from services.replica.training.exchange import Exchange, GroupBroken
from shared import names
from shared.rounds import Group, to_json

MEMBERS = ("replica-0", "replica-1", "replica-2")


async def run(url: str, name: str, todo: dict[int, str], timeout: float) -> dict[int, Any]:
    """Start the ranks of ``todo`` as processes; rank -> what it printed (None: nothing)."""

    async def one(rank: int) -> Any:
        group = Group(id=name, rank=rank, members=MEMBERS, timeout=timeout)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.federated.group_member", url, json.dumps(to_json(group)), todo[rank]),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        out, _ = await process.communicate()
        return json.loads(out) if out.strip() else None

    return dict(zip(todo, await asyncio.gather(*map(one, todo)), strict=True))


async def test_rank_0_gathers_every_members_tensors_whole(
    redis: Redis, redis_server: RedisServer
) -> None:
    said = await run(redis_server.url, "g1", dict.fromkeys(range(3), "exchange"), 30.0)
    assert said[0]["sums"] == {
        "replica-1": {"a": [28.0, 8], "b": [15.0, 3, 5]},
        "replica-2": {"a": [105.0, 15], "b": [30.0, 3, 5]},
    }
    assert said[0]["bytes"] == said[1]["bytes"] + said[2]["bytes"] == (8 + 15 + 15 + 15) * 4
    assert await redis.ttl(names.group("g1")) > 0  # nothing is left behind for ever


async def test_a_member_that_dies_or_never_comes_breaks_the_group_in_bounded_time(
    redis: Redis, redis_server: RedisServer
) -> None:
    killed, absent = await asyncio.gather(
        run(redis_server.url, "g2", {0: "exchange", 1: "die", 2: "exchange"}, 20.0),
        run(redis_server.url, "g3", {0: "exchange", 2: "exchange"}, 3.0),
    )
    assert killed[1] is None
    assert "broken" in killed[0]
    assert "g2" in killed[0]["broken"]
    assert "rendezvous" in absent[0]["broken"]
    assert "rendezvous" in absent[2]["broken"]


# ---------------------------------------------------------------- NCCL, with its group replaced


class Nccl:
    """What an exchange uses of ``ProcessGroupNCCL``."""

    class Options:
        _timeout = timedelta()

    def __init__(self, store: Any, rank: int, world: int, options: Options) -> None:
        self.ended = ""
        assert (rank, world, options._timeout) == (1, 3, timedelta(seconds=5))

    def send(self, tensors: list[Any], rank: int, tag: int) -> Any:
        return self

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        self.ended = "aborted"

    def shutdown(self) -> None:
        self.ended = "shut down"


def _nccl_group(name: str) -> Group:
    return Group(id=name, rank=1, members=MEMBERS, timeout=5.0, backend="nccl")


@pytest.mark.parametrize("fails", [False, True])
def test_an_nccl_group_is_ended_by_what_happened_in_it(
    fails: bool, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken one is aborted: its orderly end would wait for the member that is gone."""

    def refuse(self: Nccl) -> None:
        raise RuntimeError("NCCL timeout")

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    if fails:
        monkeypatch.setattr(Nccl, "wait", refuse)
    client = sync_redis.Redis.from_url(redis_server.url)
    exchange = Exchange(client, _nccl_group("n1"))
    outcome: Any = pytest.raises(GroupBroken, match="NCCL timeout") if fails else nullcontext()
    group: Any = None
    with outcome, exchange:
        group = exchange._pg
        exchange.send({"a": np.ones(3, np.float32)})
    assert group.ended == ("aborted" if fails else "shut down")


def test_a_torch_without_nccl_breaks_the_group_so_that_redis_takes_over(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    client = sync_redis.Redis.from_url(redis_server.url)
    with pytest.raises(GroupBroken, match="no NCCL"), Exchange(client, _nccl_group("n2")):
        pass
