"""How much a tenant may: requests and tokens a minute, and requests at once.

The books lie in Redis, so that a limit holds over all gateway processes together. Each process
sends what it has to ask and to report in one round trip at a time; a tenant without limits costs
none. A process that dies is dropped from the count of running requests within ``STALE_SECONDS``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.gateway.errors import ApiError, Headers, unavailable
from services.gateway.limit_books import ADMIT, REPORT, STALE_SECONDS
from services.gateway.settings import LimitSettings, TenantSettings
from shared import names
from shared.redis_client import TRANSIENT, Backoff

log = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
MOST = 500  # admissions a round trip


class Limited(ApiError):
    """429, with the rate-limit headers of the moment."""

    def __init__(self, message: str, wait: float, limits: Headers) -> None:
        super().__init__(
            429, message, type="rate_limit_error", code="rate_limit_exceeded", retry_after=wait
        )
        self._limits = limits

    def headers(self) -> Headers:
        return [*super().headers(), *self._limits]


class Account:
    """One tenant's limits, and what this process has to report about it."""

    __slots__ = ("keys", "limits", "returned", "running", "told")

    def __init__(self, tenant: str, limits: LimitSettings) -> None:
        self.limits = limits
        self.keys = (names.tenant_levels(tenant), names.tenant_running(tenant))
        self.running = 0  # requests of this process that were let in
        self.told = 0  # of them, as Redis knows
        self.returned = 0  # tokens reserved and not used

    @property
    def counted(self) -> bool:
        return self.limits.concurrency is not None

    @property
    def changed(self) -> bool:
        return self.returned > 0 or (self.counted and self.running != self.told)

    def leave(self, unused: int) -> None:
        """A request is over."""
        self.running -= 1
        if self.limits.tokens_per_minute is not None:
            self.returned += max(0, unused)


class Pass:
    """A request that was let in; ``close`` gives back what it did not use."""

    __slots__ = ("_account", "_reserved", "_wake")

    def __init__(self, account: Account, reserved: int, wake: Callable[[], None]) -> None:
        self._account, self._reserved, self._wake = account, reserved, wake

    def close(self, used: int) -> None:
        self._account.leave(self._reserved - used)
        self._wake()


class _Asking(NamedTuple):
    account: Account
    tokens: int
    answer: asyncio.Future[list[bytes]]
    since: float  # by the event loop's clock


class Limits:
    """All tenants' limits as this process sees them; ``run`` carries everything to Redis."""

    def __init__(
        self,
        redis: Redis,
        default: LimitSettings,
        tenants: Mapping[str, TenantSettings],
        redis_wait: float,
    ) -> None:
        """``redis_wait``: seconds a request waits for a Redis that is away."""
        self._redis, self._wait = redis, redis_wait
        self._process = secrets.token_hex(6)
        self._default, self._tenants = default, tenants
        self._accounts: dict[str, Account] = {}
        self._asking: list[_Asking] = []
        self._event = asyncio.Event()
        self.none = default == LimitSettings() and all(
            t.limits == LimitSettings() for t in tenants.values()
        )

    async def admit(self, tenant: str, tokens: int) -> tuple[Pass | None, Headers]:
        """Let a request of up to ``tokens`` (prompt and answer) in; with the answer's headers.

        No pass where the tenant has no limits. Raises ApiError 429; 503 when Redis is away.
        """
        limits = self._limits(tenant)
        if limits == LimitSettings():
            return None, []
        most = limits.tokens_per_minute
        if most is not None and tokens > most:
            raise _too_big(tokens, most)
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant, limits)
        used_up, headers, wait = await self._ask(account, tokens)
        if used_up:
            raise Limited(_why(used_up, limits), wait, headers)
        return Pass(account, tokens, self.wake), headers

    def _limits(self, tenant: str) -> LimitSettings:
        own = self._tenants.get(tenant)
        return self._default if own is None else own.limits

    async def _ask(self, account: Account, tokens: int) -> tuple[str, Headers, float]:
        loop = asyncio.get_running_loop()
        asking = _Asking(account, tokens, loop.create_future(), loop.time())
        self._asking.append(asking)
        self.wake()
        try:
            what, requests, left, wait = await asking.answer
        except asyncio.CancelledError:
            if _let_in(asking.answer):
                account.leave(tokens)
                self.wake()
            raise
        headers = _headers("requests", account.limits.requests_per_minute, float(requests))
        headers += _headers("tokens", account.limits.tokens_per_minute, float(left))
        return what.decode(), headers, float(wait)

    # ------------------------------------------------------------ Redis

    def wake(self) -> None:
        self._event.set()

    async def run(self) -> None:
        """Carry admissions and reports as they come, and report running requests each second."""
        backoff, loop = Backoff(), asyncio.get_running_loop()
        due = loop.time()
        while not self.none:
            try:
                async with asyncio.timeout_at(due):
                    await self._event.wait()
            except TimeoutError:
                pass  # nothing new: what still runs is reported again
            self._event.clear()
            everything = loop.time() >= due
            try:
                await self.flush(everything=everything)
                backoff.reset()
            except TRANSIENT as e:
                log.debug("limits wait for Redis: %s", e)
                self._give_up()
                await backoff.wait()
                self.wake()
            if everything:
                due = loop.time() + REPORT_SECONDS

    async def flush(self, *, everything: bool = False) -> None:
        """One round trip, with ``everything`` for what has not changed as well.

        Raises one of TRANSIENT; what it carried is kept then.
        """
        asking = [a for a in self._asking[:MOST] if not a.answer.done()]
        asked_of = {a.account for a in asking}
        told = [
            (a, a.running, a.returned)
            for a in self._accounts.values()
            if a.changed or (a.counted and (a in asked_of or (everything and a.running > 0)))
        ]
        results = await self._send(asking, told) if asking or told else []
        for (account, running, returned), result in zip(told, results, strict=False):
            if isinstance(result, Exception):
                log.error("a tenant's use was not reported: %s", result)
            account.told, account.returned = running, account.returned - returned
        for asked, result in zip(asking, results[len(told) :], strict=True):
            _settle(asked, result)
        self._asking = [a for a in self._asking if not a.answer.done()]
        if self._asking:
            self.wake()

    async def _send(self, asking: list[_Asking], told: list[tuple[Account, int, int]]) -> list[Any]:
        pipe = self._redis.pipeline(transaction=False)
        for account, running, returned in told:
            counted = running if account.counted else -1
            tokens = account.limits.tokens_per_minute or 0
            pipe.eval(REPORT, 2, *account.keys, self._process, counted, tokens, returned)
        for account, amount, _, _ in asking:
            limits = account.limits
            pipe.eval(
                ADMIT,
                2,
                *account.keys,
                self._process,
                limits.requests_per_minute or 0,
                limits.tokens_per_minute or 0,
                limits.concurrency or 0,
                amount,
                STALE_SECONDS,
            )
        results: list[Any] = await pipe.execute(raise_on_error=False)
        if away := next((r for r in results if isinstance(r, TRANSIENT)), None):
            raise away  # Redis is loading its file, or became a replica
        return results

    def _give_up(self) -> None:
        """Requests wait for Redis, but not for ever."""
        now = asyncio.get_running_loop().time()
        for asked in self._asking:
            if now - asked.since > self._wait and not asked.answer.done():
                error = unavailable(f"Redis is away for more than {self._wait:g} s", 5.0)
                asked.answer.set_exception(error)


def _settle(asked: _Asking, result: Any) -> None:
    if isinstance(result, ResponseError):
        log.error("Redis refused to keep a tenant's limits: %s", result)
        if not asked.answer.done():
            error = ApiError(500, "the tenant's limits could not be checked", type="server_error")
            asked.answer.set_exception(error)
        return
    account, let_in = asked.account, result[0] == b""
    if let_in:
        account.running += 1
        account.told += 1
    if not asked.answer.done():
        asked.answer.set_result(result)
    elif let_in:
        account.leave(asked.tokens)  # its client went away meanwhile


def _let_in(answer: asyncio.Future[list[bytes]]) -> bool:
    good = answer.done() and not answer.cancelled() and answer.exception() is None
    return good and answer.result()[0] == b""


def _headers(what: str, limit: int | None, level: float) -> Headers:
    """OpenAI's x-ratelimit headers."""
    if limit is None:
        return []
    values = (
        ("limit", str(limit)),
        ("remaining", str(max(0, int(level)))),
        ("reset", f"{(limit - level) * 60.0 / limit:.3f}s"),
    )
    return [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in values]


def _why(used_up: str, limits: LimitSettings) -> str:
    if used_up == "concurrency":
        return f"{limits.concurrency} requests of this tenant are running already"
    limit = limits.requests_per_minute if used_up == "requests" else limits.tokens_per_minute
    return f"the limit of {limit} {used_up} a minute is reached"


def _too_big(amount: int, limit: int) -> ApiError:
    return ApiError(
        429,
        f"the request needs {amount} tokens, more than the {limit} of a whole minute: it can "
        "never be served within this limit",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        retry=False,
    )
