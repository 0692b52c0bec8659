"""Prometheus series disappear with what they describe."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from redis.asyncio import Redis

from services.coordinator.meters import Meters as Coordinator
from services.dispatcher.counters import Counters
from services.replica.engines.base import EngineStatus
from services.replica.meters import Meters as Replica
from shared import names
from shared.messages import TrainSample


def text(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


async def test_the_dispatcher_tells_of_redis_and_of_streams_that_are_there(redis: Redis) -> None:
    counters = Counters()
    stream = names.requests("m")
    await redis.xadd(stream, {"id": "1"})
    await counters.redis.look(redis, ["m"], ["r0"])
    assert f'collm_stream_length{{stream="{stream}"}} 1.0' in text(counters.registry)
    assert f'collm_stream_pending{{stream="{stream}"}}' not in text(counters.registry)
    await redis.xgroup_create(stream, names.GROUP_DISPATCHER, "0")
    await redis.xreadgroup(names.GROUP_DISPATCHER, "me", {stream: ">"})
    await redis.config_set("maxmemory", 64 << 20)
    try:
        await counters.redis.look(redis, ["m"], [])
    finally:
        await redis.config_set("maxmemory", 0)
    found = text(counters.registry)
    assert f'collm_stream_pending{{stream="{stream}"}} 1.0' in found
    assert "collm_redis_memory_limit_bytes 6.7108864e+07" in found
    assert "collm_redis_persistence_ok 0.0" in found, "this server keeps no file"
    assert names.batches("r0") not in found
    counters.stand_by()
    left = text(counters.registry)
    assert stream not in left
    assert "\ncollm_redis_memory_bytes " not in left


def test_the_coordinator_forgets_a_replica() -> None:
    meters = Coordinator()
    for name in ("r0", "r1"):
        meters.trained(
            TrainSample(
                replica=name, adapter="a", time=1.0, round=1, step=1, B=4, b=0,
                micro_seconds=0.2, tokens=64,
            )
        )  # fmt: skip
        meters.r2.labels(name, "two").set(0.9)
    assert 'collm_train_tokens_total{adapter="a",replica="r0"} 64.0' in text(meters.registry)
    meters.forget_replica("r0")
    assert '"r0"' not in text(meters.registry)
    assert '"r1"' in text(meters.registry)


def test_preemptions_are_counted_once_though_the_engine_tells_a_sum() -> None:
    meters = Replica("m", "torch")
    for so_far in (2, 2, 5):
        status = EngineStatus(
            running=0, waiting=0, kv_used=0, kv_total=1, b_limit=1, adapters={},
            preemptions=so_far,
        )  # fmt: skip
        meters.state("r0", status, None)
    line = 'collm_num_preemptions_total{engine="r0",model_name="m"} 5.0'
    assert line in text(meters.registry)
