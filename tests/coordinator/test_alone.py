"""Sessions of replicas that serve nothing beside: no load is a reason to train less."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from services.coordinator.context import Context
from services.coordinator.goodput import Progress
from services.coordinator.settings import CoordinatorSettings, TrainingOptions
from shared import demand
from shared.demand import ModelDemand
from shared.latency import LatencyModel
from shared.records import ReplicaRecord
from shared.sessions import Session

MODEL = LatencyModel(
    alpha1=0.01, alpha2=0.1, alpha0=0.09, pi1=0.001, pi2=0.1, gamma1=0.5, gamma2=0.1, gamma0=0.5
)


class _Cluster:
    async def live(self) -> dict[str, ReplicaRecord]:
        return {
            "s": ReplicaRecord(id="s", model="m", state="serving", b_max=8),
            "t": ReplicaRecord(id="t", model="m", state="combined", b_max=8),
        }


class _Telemetry:
    def planes(self, name: str, now: float) -> Any:
        return SimpleNamespace(model=lambda: MODEL)

    def round_cost(self, adapter: str) -> float:
        return 0.0

    def progress(self, adapter: str, name: str) -> Progress:
        return Progress()

    def lengths(self, base: str) -> tuple[float, float]:
        return 10.0, 10.0


@pytest.mark.parametrize("alone", [True, False])
async def test_load_rests_training_only_where_the_replica_serves_beside(
    redis: Redis, alone: bool
) -> None:
    nothing = cast(Any, None)
    context = Context(
        redis=redis,
        lease=nothing,
        now=lambda: 0.0,
        settings=CoordinatorSettings(),
        registry=nothing,
        jobs=nothing,
        cluster=cast(Any, _Cluster()),
        telemetry=cast(Any, _Telemetry()),
        meters=nothing,
    )
    asked = ModelDemand(rate=1000.0, prompt=10.0, output=10.0, slo=2.0)
    await demand.write(redis, "m", asked)
    session = Session(id="x", adapter="a", base="m", clients=("t",), server="t", alone=alone)
    restored = Session.from_hash({k.encode(): v.encode() for k, v in session.to_hash().items()})
    assert restored == session
    choices = await context.choose(restored, TrainingOptions())
    assert list(choices) == ["t"]
    assert (choices["t"].B > 0) is alone
