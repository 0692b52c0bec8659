"""POST /v1/feedback: what a user thinks of an answer becomes training data, if the tenant wants.

Off unless the tenant has a ``feedback_adapter`` in the settings. Then that tenant's recent chats
are kept in Redis for an hour, so that a request id is enough, whichever gateway is told; a good
rating or a corrected answer becomes one example at the adapter's home replica. Nothing else is
kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.gateway.access import Principal
from services.gateway.errors import ApiError, bad_value, unavailable
from services.gateway.routes import body_of, caller, json, not_found
from shared import data_homes, names
from shared.adapters import Conflict
from shared.rounds import Lora
from shared.tail import just_before

if TYPE_CHECKING:
    from services.gateway.service import Gateway

log = logging.getLogger(__name__)

KEEP = 2000  # chats a tenant
KEEP_SECONDS = 3600
LONGEST = 100_000  # characters of a corrected answer, and bytes of a chat that is kept
LONGEST_ID = 200  # characters
STORE_SECONDS = 30.0
LORA = Lora()  # shape of a tenant's adapter that feedback makes

# Keep a chat; the oldest go when there are more than ARGV[3]. KEYS: chat, index. ARGV: id, chat,
# most, seconds, what the chats' keys begin with.
_KEEP = """
local now = tonumber(redis.call('TIME')[1])
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[4])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[4])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - tonumber(ARGV[4]))
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1 - tonumber(ARGV[3]))) do
  redis.call('DEL', ARGV[5] .. id)
  redis.call('ZREM', KEYS[2], id)
end
return 1
"""


class FeedbackRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``request_id`` is an answer's x-request-id or id; a rating, a corrected answer, or both."""

    request_id: str
    rating: Literal["good", "bad"] | None = None
    corrected: str | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A chat that was answered."""

    base: str  # model
    adapter: str  # that learns from it
    messages: list[dict[str, Any]]
    answer: str
    home: str = ""  # replica that holds the example made of it


_request = msgspec.json.Decoder(FeedbackRequest)
_asked = msgspec.json.Decoder(Asked)


class Memory:
    """Recent chats of the tenants that want it, by request id; bounded in number, size, time."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._keeping: dict[tuple[str, str], asyncio.Task[None]] = {}

    def keep(self, tenant: str, request_ids: set[str], asked: Asked) -> None:
        """In the background: the answer is out, and nobody waits for this."""
        value = msgspec.json.encode(asked)
        if len(value) > LONGEST:
            return  # feedback on it is a 404, like on one that is too old
        for request_id in request_ids:
            task = asyncio.create_task(self._keep(tenant, request_id, value))
            self._keeping[tenant, request_id] = task

    async def _keep(self, tenant: str, request_id: str, value: bytes) -> None:
        prefix, index = names.tenant_chat(tenant, ""), names.tenant_chats(tenant)
        key = prefix + request_id
        arguments = (request_id, value, str(KEEP), str(KEEP_SECONDS), prefix)
        try:
            await self._redis.eval(_KEEP, 2, key, index, *arguments)
        except RedisError as e:
            log.warning("a chat is not kept for feedback: %s", type(e).__name__)
        finally:
            if self._keeping.get((tenant, request_id)) is asyncio.current_task():
                del self._keeping[tenant, request_id]

    async def find(self, tenant: str, request_id: str) -> Asked | None:
        if (task := self._keeping.get((tenant, request_id))) is not None:
            await task  # a user who is quicker than Redis
        raw = await self._redis.get(names.tenant_chat(tenant, request_id))
        return None if raw is None else _asked.decode(raw)

    async def learnt(self, tenant: str, request_id: str, asked: Asked, home: str) -> None:
        """Where the example lies, so that later feedback replaces it."""
        value = msgspec.json.encode(msgspec.structs.replace(asked, home=home))
        await self._redis.set(names.tenant_chat(tenant, request_id), value, xx=True, keepttl=True)

    async def close(self) -> None:
        await asyncio.gather(*self._keeping.values())


def add(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/feedback")
    async def feedback(request: Request) -> Response:
        told = await body_of(request, gateway, _request)
        return json(await take(gateway, told, caller(request)))


async def take(gateway: Gateway, told: FeedbackRequest, who: Principal) -> dict[str, Any]:
    """The answer to feedback. The latest on a chat replaces what was learnt of it before.

    Raises ApiError 400, 403, 404, 409, 429, 503.
    """
    own = gateway.settings.tenants.get(who.tenant)
    if own is None or not own.feedback_adapter:
        message = (
            f"tenant {who.tenant!r} keeps no feedback; the operator names an adapter for it in "
            f"gateway.tenants.{who.tenant}.feedback_adapter"
        )
        raise ApiError(403, message, type="permission_error")
    if told.rating is None and told.corrected is None:
        raise bad_value("rating", "a rating or a corrected answer is required")
    if told.corrected is not None and not 1 <= len(told.corrected) <= LONGEST:
        raise bad_value("corrected", f"corrected has 1 to {LONGEST} characters")
    if len(told.request_id) > LONGEST_ID:
        raise bad_value("request_id", f"request_id has at most {LONGEST_ID} characters")
    request_id = told.request_id.removeprefix("chatcmpl-").removeprefix("resp_")
    asked = await gateway.memory.find(who.tenant, request_id)
    if asked is None:
        raise not_found("recent chat", told.request_id, "request_id")
    learnt = told.corrected
    if learnt is None and told.rating == "good":
        learnt = asked.answer
    if not learnt:
        if asked.home:
            file = _file(request_id)
            await data_homes.send_delete(gateway.redis, asked.home, asked.adapter, file)
            await gateway.storage.book_example(who.tenant, file, 0)
            await gateway.memory.learnt(who.tenant, request_id, asked, "")
        return {"object": "feedback", "request_id": told.request_id, "stored": False}
    home = await _store(gateway, who.tenant, request_id, asked, learnt)
    await gateway.memory.learnt(who.tenant, request_id, asked, home)
    return {
        "object": "feedback",
        "request_id": told.request_id,
        "stored": True,
        "adapter": asked.adapter,
        "home": home,
    }


def _file(request_id: str) -> str:
    """One file a chat: told twice, it is learnt once."""
    return f"feedback-{hashlib.sha256(request_id.encode()).hexdigest()[:24]}"


async def _store(gateway: Gateway, tenant: str, request_id: str, asked: Asked, learnt: str) -> str:
    """One example at the adapter's home replica; returns it. Raises ApiError 400, 409, 429, 503."""
    base = await _claim(gateway, tenant, asked)
    live = gateway.catalogue.now.homes(base)
    if asked.home in live:
        home = asked.home
    else:
        try:
            (home,) = data_homes.choose(live, asked.adapter)
        except data_homes.NoHome as e:
            raise unavailable(str(e), 5.0) from None
    sample = {"messages": [*asked.messages, {"role": "assistant", "content": learnt}]}
    raw = msgspec.json.encode(sample) + b"\n"
    await gateway.storage.book_example(tenant, _file(request_id), len(raw))
    try:
        await _send(gateway, home, asked.adapter, _file(request_id), raw)
    except ApiError as e:
        if e.status == 400:  # refused; one that was not answered in time may be stored all the same
            await gateway.storage.book_example(tenant, _file(request_id), 0)
        raise
    return home


async def _send(gateway: Gateway, home: str, adapter: str, file: str, raw: bytes) -> None:
    """Stored when this returns. Raises ApiError 400, 503."""
    redis = gateway.redis
    since = await just_before(redis)
    ticket = await data_homes.send(redis, home, adapter, file, raw)
    answers = await data_homes.answers(redis, [ticket], since, STORE_SECONDS)
    if ticket not in answers:
        raise unavailable("the data's home did not answer in time", 5.0)
    if answers[ticket].get("ok") != "1":
        raise ApiError(400, "this chat cannot be learnt from: " + answers[ticket].get("why", ""))


async def _claim(gateway: Gateway, tenant: str, asked: Asked) -> str:
    """The adapter's base model. What a tenant's users say is learnt by an adapter of its own
    and by no other: whoever may ask an adapter can draw out what it learnt. Raises ApiError 409.
    """
    registry = gateway.adapters.registry
    found = await registry.get(asked.adapter)
    if found is None and tenant:
        try:
            await registry.register(
                asked.adapter,
                base=asked.base,
                rank=LORA.rank,
                lora_alpha=LORA.lora_alpha,
                tenant=tenant,
                source="data",
            )
        except Conflict as e:  # registered a moment ago
            raise ApiError(409, str(e), code="conflict") from None
        shape: dict[str, str | int | float] = {"rank": LORA.rank, "lora_alpha": LORA.lora_alpha}
        await registry.set_training(asked.adapter, shape)
    elif found is not None and found.tenant != tenant:
        raise ApiError(
            409,
            f"feedback_adapter {asked.adapter!r} is not this tenant's own; the operator must name "
            "another in the settings",
            code="conflict",
        )
    return asked.base if found is None else found.base
