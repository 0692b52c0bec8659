"""Prometheus gauges of Redis itself: its memory and health, and the streams' lengths.

The acting dispatcher looks, so that a cluster has these numbers once. A look is two round trips.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.asyncio import Redis

from shared import names
from shared.redis_client import is_missing_group

_PLAIN = (names.METRICS, names.EVENTS, names.DECISIONS, names.DEAD_LETTERS)
# Metric -> field of INFO, what it is.
_FACTS = {
    "collm_redis_memory_bytes": ("used_memory", "Memory in use"),
    "collm_redis_memory_limit_bytes": ("maxmemory", "maxmemory; 0: none"),
    "collm_redis_clients": ("connected_clients", "Connections"),
    "collm_redis_blocked_clients": ("blocked_clients", "Connections that wait for an entry"),
    "collm_redis_commands_per_second": ("instantaneous_ops_per_sec", "Commands carried out"),
    "collm_redis_evicted_keys": ("evicted_keys", "Keys evicted since its start; must stay 0"),
}
_PERSISTENCE = "collm_redis_persistence_ok"
_SECONDS = "collm_redis_round_trip_seconds"
_ALL = {
    **{name: text for name, (_, text) in _FACTS.items()},
    _PERSISTENCE: "1: the append-only file is on and its last write went well",
    _SECONDS: "Round trip of the last look",
}


class RedisMeter(Collector):
    """What the last look found; nothing before it and after ``clear``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.clear()
        registry.register(self)

    def clear(self) -> None:
        """This process looks no more."""
        self._values: dict[str, float] = {}
        self._lengths: dict[str, int] = {}
        self._pending: dict[str, int] = {}

    async def look(self, redis: Redis, models: Iterable[str], replicas: Iterable[str]) -> None:
        """Measure now. Series of models and replicas that are gone disappear."""
        started = time.perf_counter()
        info = await redis.info()
        self._values = {_SECONDS: time.perf_counter() - started, **_facts(info)}
        groups = {names.requests(m): names.GROUP_DISPATCHER for m in models}
        groups |= {names.batches(r): names.GROUP_REPLICA for r in replicas}
        streams = (*_PLAIN, *groups)
        async with redis.pipeline(transaction=False) as pipe:
            for stream in streams:
                pipe.xlen(stream)
            for stream, group in groups.items():
                pipe.xpending(stream, group)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and not is_missing_group(answer):
                raise answer
        self._lengths = dict(zip(streams, answers, strict=False))
        self._pending = {
            stream: found["pending"]
            for stream, found in zip(groups, answers[len(streams) :], strict=True)
            if not isinstance(found, Exception)  # nobody has read it yet
        }

    def collect(self) -> Iterator[Metric]:
        for name, text in _ALL.items():
            family = GaugeMetricFamily(name, text)
            if name in self._values:
                family.add_metric([], self._values[name])
            yield family
        for name, text, found in (
            ("collm_stream_length", "Entries", self._lengths),
            ("collm_stream_pending", "Entries read and not acknowledged", self._pending),
        ):
            family = GaugeMetricFamily(name, text, labels=["stream"])
            for stream, value in found.items():
                family.add_metric([stream], value)
            yield family


def _facts(info: Mapping[str, Any]) -> dict[str, float]:
    found = {name: float(info[field]) for name, (field, _) in _FACTS.items()}
    good = info["aof_enabled"] == 1 and info["aof_last_write_status"] == "ok"
    return {**found, _PERSISTENCE: float(good)}
