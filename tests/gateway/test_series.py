"""Series of a model disappear from /metrics with the model."""

from __future__ import annotations

from redis.asyncio import Redis

from shared import names
from tests.gateway.conftest import MODEL, Served


async def test_a_model_that_is_served_no_more_leaves_no_series(
    served: Served, redis: Redis
) -> None:
    assert (await served.chat()).status_code == 200
    series = (
        f'collm_request_success_total{{engine="torch",finished_reason="stop",model_name="{MODEL}"}}'
    )
    assert series in (await served.http.get("/metrics")).text
    await redis.srem(names.MODELS, MODEL)
    await served.gateway.catalogue.refresh()
    left = (await served.http.get("/metrics")).text
    assert f'model_name="{MODEL}"' not in left
    assert names.requests(MODEL) not in left
