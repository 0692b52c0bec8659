"""POST /v1/feedback: what a user thinks of an answer becomes training data, if the tenant wants.

Off unless the tenant has a ``feedback_adapter`` in the settings. Then this process keeps that
tenant's recent answers in memory for a while, so that a request id is enough; a good rating or
a corrected answer becomes one example at the adapter's home replica. Nothing else is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import orjson
from fastapi import FastAPI, Request, Response

from services.gateway.errors import ApiError, bad_value, unavailable
from services.gateway.routes import body_of, caller, json, not_found
from shared import data_homes

if TYPE_CHECKING:
    from services.gateway.service import Gateway

KEEP = 2000  # answers
KEEP_SECONDS = 3600.0
LONGEST = 100_000  # characters of a corrected answer
STORE_SECONDS = 30.0


class FeedbackRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``request_id`` is an answer's x-request-id or id; a rating, a corrected answer, or both."""

    request_id: str
    rating: Literal["good", "bad"] | None = None
    corrected: str | None = None


class Asked(msgspec.Struct, frozen=True):
    """A chat that was answered."""

    tenant: str
    adapter: str
    messages: list[dict[str, Any]]
    answer: str
    at: float


_decoder = msgspec.json.Decoder(FeedbackRequest)


class Memory:
    """Recent answers by request id; bounded in number and in time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, Asked] = OrderedDict()

    def keep(
        self,
        request_id: str,
        tenant: str,
        adapter: str,
        messages: list[dict[str, Any]],
        answer: str,
    ) -> None:
        now = self._clock()
        self._kept[request_id] = Asked(tenant, adapter, messages, answer, now)
        while len(self._kept) > KEEP or next(iter(self._kept.values())).at < now - KEEP_SECONDS:
            self._kept.popitem(last=False)

    def find(self, request_id: str, tenant: str) -> Asked | None:
        found = self._kept.get(request_id)
        if found is None or found.tenant != tenant or found.at < self._clock() - KEEP_SECONDS:
            return None
        return found


def add(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/feedback")
    async def feedback(request: Request) -> Response:
        asked = await body_of(request, gateway, _decoder)
        tenant = caller(request).tenant
        own = gateway.settings.tenants.get(tenant)
        if own is None or not own.feedback_adapter:
            raise ApiError(403, "this tenant keeps no feedback", type="permission_error")
        if asked.rating is None and asked.corrected is None:
            raise bad_value("rating", "a rating or a corrected answer is required")
        if asked.corrected is not None and not 1 <= len(asked.corrected) <= LONGEST:
            raise bad_value("corrected", f"corrected has 1 to {LONGEST} characters")
        answered = gateway.memory.find(asked.request_id.removeprefix("chatcmpl-"), tenant)
        if answered is None:
            raise not_found("recent chat", asked.request_id[:120])
        learnt = asked.corrected
        if learnt is None and asked.rating == "good":
            learnt = answered.answer
        if learnt is None:
            return json({"object": "feedback", "request_id": asked.request_id, "stored": False})
        home = await _store(gateway, answered, learnt)
        return json(
            {
                "object": "feedback",
                "request_id": asked.request_id,
                "stored": True,
                "adapter": answered.adapter,
                "home": home,
            }
        )


async def _store(gateway: Gateway, answered: Asked, learnt: str) -> str:
    """One example at the adapter's home replica. Raises ApiError 503."""
    target = gateway.catalogue.find(answered.adapter)
    base = target.model.name if target else next(iter(gateway.catalogue.now.models), "")
    live = sorted(gateway.catalogue.now.replicas.get(base, {}))
    try:
        (home,) = data_homes.choose(live, answered.adapter)
    except data_homes.NoHome as e:
        raise unavailable(str(e), 5.0) from None
    sample = {"messages": [*answered.messages, {"role": "assistant", "content": learnt}]}
    redis = gateway.redis
    seconds, micros = await redis.time()
    since = f"{seconds * 1000 + micros // 1000 - 1}-0"
    name = f"feedback-{seconds}-{micros:06d}"
    ticket = await data_homes.send(
        redis, home, answered.adapter, name, orjson.dumps(sample) + b"\n"
    )
    answers = await data_homes.answers(redis, [ticket], since, STORE_SECONDS)
    if answers.get(ticket, {}).get("ok") != "1":
        raise unavailable("the data's home did not take it", 5.0)
    return home
