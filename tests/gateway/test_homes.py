"""Where training data may go: to replicas that train, where only some of them do."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from shared import names
from shared.records import ReplicaRecord
from tests.gateway.conftest import MODEL, Start


@pytest.mark.parametrize(
    ("trains", "homes"),
    [
        ({"a": True, "b": False}, ["a", f"{MODEL}-r0"]),
        ({"a": False, "b": False}, [f"{MODEL}-r0"]),
    ],
)
async def test_replicas_that_only_serve_get_no_training_data(
    start: Start, redis: Redis, trains: dict[str, bool], homes: list[str]
) -> None:
    async with start() as served:
        for name, on in trains.items():
            record = ReplicaRecord(id=name, model=MODEL, state="serving", trains=on)
            assert (
                ReplicaRecord.from_hash(
                    {k.encode(): v.encode() for k, v in record.to_hash().items()}
                )
                == record
            )
            await redis.hset(names.replica(name), mapping=record.to_hash())
            await redis.sadd(names.REPLICAS, name)
            await redis.set(names.replica_alive(name), "1")
        catalogue = served.gateway.catalogue
        await catalogue.refresh()
        assert catalogue.now.homes(MODEL) == homes
        await redis.hset(names.replica(f"{MODEL}-r0"), "trains", "false")
        await catalogue.refresh()
        expected = ["a"] if trains["a"] else ["a", "b", f"{MODEL}-r0"]
        assert catalogue.now.homes(MODEL) == expected, "all, if none of them trains"
