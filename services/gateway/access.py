"""Who is calling, and how much they may: keys, tenants, roles, limits a minute.

Limits hold for each gateway process: with several behind one address, a tenant's share of each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from services.gateway.errors import ApiError, Headers
from services.gateway.settings import LimitSettings, TenantSettings
from shared import api_keys

log = logging.getLogger(__name__)

RELOAD_SECONDS = 0.5


class Principal(msgspec.Struct, frozen=True):
    """The caller. ``tenant`` "" is the operator's own (everybody's things belong to it)."""

    tenant: str
    admin: bool

    @property
    def sees(self) -> str | None:
        """The tenant whose things the caller sees; None: everything."""
        return None if self.admin else self.tenant


OPERATOR = Principal("", True)


class Bucket:
    """Tokens that refill evenly, ``limit`` a minute, at most ``limit`` at once."""

    __slots__ = ("_at", "_level", "limit")

    def __init__(self, limit: int, now: float) -> None:
        self.limit, self._level, self._at = limit, float(limit), now

    def refill(self, now: float) -> float:
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / 60.0)
        self._at = now
        return self._level

    def wait(self, amount: float) -> float:
        """Seconds until ``amount`` is there; 0: now."""
        return max(0.0, (amount - self._level) * 60.0 / self.limit)

    def take(self, amount: float) -> None:
        self._level -= amount

    def give_back(self, amount: float) -> None:
        self._level = min(self.limit, self._level + amount)

    def headers(self, what: str) -> Headers:
        """OpenAI's x-ratelimit headers."""
        full = (self.limit - self._level) * 60.0 / self.limit
        values = (
            ("limit", str(self.limit)),
            ("remaining", str(max(0, int(self._level)))),
            ("reset", f"{full:.3f}s"),
        )
        return [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in values]


class Account:
    """One tenant's limits and what it uses now."""

    def __init__(self, limits: LimitSettings, now: float) -> None:
        self.requests = _bucket(limits.requests_per_minute, now)
        self.tokens = _bucket(limits.tokens_per_minute, now)
        self.concurrency = limits.concurrency
        self.running = 0

    def headers(self) -> Headers:
        found: Headers = []
        if self.requests is not None:
            found += self.requests.headers("requests")
        if self.tokens is not None:
            found += self.tokens.headers("tokens")
        return found


def _bucket(limit: int | None, now: float) -> Bucket | None:
    return None if limit is None else Bucket(limit, now)


class Pass:
    """A request that was let in; ``close`` gives back what it did not use."""

    __slots__ = ("_account", "_reserved")

    def __init__(self, account: Account, reserved: int) -> None:
        self._account, self._reserved = account, reserved

    def close(self, used: int) -> None:
        self._account.running -= 1
        if self._account.tokens is not None:
            self._account.tokens.give_back(max(0, self._reserved - used))


class Access:
    """Keys and accounts. Without a keys file everybody is the operator."""

    def __init__(
        self,
        path: Path | None,
        default: LimitSettings,
        tenants: Mapping[str, TenantSettings],
        clock: Callable[[], float],
    ) -> None:
        """Raises api_keys.KeysError."""
        self._path, self._clock = path, clock
        self._default, self._tenants = default, tenants
        self._accounts: dict[str, Account] = {}
        self._keys = None if path is None else api_keys.read(path)
        self._modified = None if path is None else _modified(path)
        self._free = default == LimitSettings() and not tenants

    @property
    def open(self) -> bool:
        """Whether no keys are asked for."""
        return self._keys is None

    def identify(self, headers: Mapping[bytes, bytes]) -> Principal:
        """The caller by its Authorization header. Raises ApiError 401."""
        if self._keys is None:
            return OPERATOR
        scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not secret.strip():
            raise _unauthorised("no API key: send it as 'Authorization: Bearer KEY'")
        key = self._keys.find(secret.strip())
        if key is None:
            raise _unauthorised("the API key is not valid")
        return Principal(key.tenant, key.role == "admin")

    def admit(self, caller: Principal, tokens: int) -> tuple[Pass | None, Headers]:
        """Let a request of up to ``tokens`` (prompt and answer) in, or raise ApiError 429.

        With the answer's rate-limit headers. No limits: no pass.
        """
        if self._free:
            return None, []
        account = self._account(caller.tenant)
        if account.concurrency is not None and account.running >= account.concurrency:
            raise _limited(
                f"{account.concurrency} requests of this tenant are running already", 1.0
            )
        now = self._clock()
        for bucket, amount, what in (
            (account.requests, 1, "requests"),
            (account.tokens, tokens, "tokens"),
        ):
            if bucket is None:
                continue
            bucket.refill(now)
            if amount > bucket.limit:
                raise _too_big(amount, bucket.limit)
            wait = bucket.wait(amount)
            if wait > 0:
                raise _limited(f"the limit of {bucket.limit} {what} a minute is reached", wait)
        if account.requests is not None:
            account.requests.take(1)
        if account.tokens is not None:
            account.tokens.take(tokens)
        account.running += 1
        return Pass(account, tokens), account.headers()

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            settings = self._tenants.get(tenant)
            limits = self._default if settings is None else settings.limits
            account = self._accounts[tenant] = Account(limits, self._clock())
        return account

    async def watch(self) -> None:
        """Take over changes of the file: a revoked key is refused within a second.

        A file that has become unreadable leaves the last good keys and says so.
        """
        while self._path is not None:
            await asyncio.sleep(RELOAD_SECONDS)
            modified = _modified(self._path)
            if modified == self._modified:
                continue
            self._modified = modified
            try:
                self._keys = api_keys.read(self._path)
                log.info("API keys read anew: %d", len(self._keys.keys))
            except api_keys.KeysError as e:
                log.error("API keys are not taken over: %s", e)


def demand_admin(caller: Principal) -> None:
    """Raises ApiError 403."""
    if not caller.admin:
        raise ApiError(403, "this route needs an admin key", type="permission_error")


def _modified(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _unauthorised(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


def _limited(message: str, wait: float) -> ApiError:
    return ApiError(
        429, message, type="rate_limit_error", code="rate_limit_exceeded", retry_after=wait
    )


def _too_big(amount: int, limit: int) -> ApiError:
    return ApiError(
        429,
        f"the request needs {amount} tokens, more than the {limit} of a whole minute: it can "
        "never be served within this limit",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        retry=False,
    )
