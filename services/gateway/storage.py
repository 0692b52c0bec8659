"""What a tenant may store: uploaded files and what its feedback became, under one quota."""

from __future__ import annotations

from redis.asyncio import Redis

from services.gateway.errors import ApiError
from services.gateway.settings import GatewaySettings
from shared import names
from shared.jobs import File, Jobs

TOTAL = ""  # field of the hash that holds the sum of the others

# Book ARGV[2] bytes for example ARGV[1], in place of what it had, unless all of them would then
# be more than ARGV[3]. Nothing is refused that needs no more than before.
_BOOK = """
local before = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
local total = tonumber(redis.call('HGET', KEYS[1], '') or '0') - before + tonumber(ARGV[2])
if tonumber(ARGV[2]) > before and total > tonumber(ARGV[3]) then return 0 end
if ARGV[2] == '0' then redis.call('HDEL', KEYS[1], ARGV[1])
else redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
redis.call('HSET', KEYS[1], '', total)
return 1
"""


class Storage:
    """Bytes by tenant, for all gateways."""

    def __init__(self, redis: Redis, jobs: Jobs, settings: GatewaySettings) -> None:
        self._redis = redis
        self._jobs = jobs
        self._settings = settings

    def quota(self, tenant: str) -> int:
        own = self._settings.tenants.get(tenant)
        if own is not None and own.storage_bytes is not None:
            return own.storage_bytes
        return self._settings.storage_bytes

    async def files(self, tenant: str) -> int:
        return sum(f.bytes for f in await self._jobs.all(File, tenant))

    async def room_for_file(self, tenant: str, size: int) -> None:
        """Raises ApiError 429."""
        learnt = await self._redis.hget(names.tenant_learnt(tenant), TOTAL)
        if await self.files(tenant) + int(learnt or 0) + size > self.quota(tenant):
            raise self._exceeded(tenant)

    async def book_example(self, tenant: str, example: str, size: int) -> None:
        """An example made of feedback now has ``size`` bytes (0: it is gone). Raises ApiError 429,
        and then nothing is booked."""
        left = self.quota(tenant) - await self.files(tenant)
        key = names.tenant_learnt(tenant)
        if not await self._redis.eval(_BOOK, 1, key, example, str(size), str(left)):
            raise self._exceeded(tenant)

    async def forget_examples(self, tenant: str) -> None:
        """The adapter that learnt them is deleted, and they with it."""
        await self._redis.delete(names.tenant_learnt(tenant))

    def _exceeded(self, tenant: str) -> ApiError:
        return ApiError(
            429,
            f"the tenant's files and feedback would exceed {self.quota(tenant)} bytes; delete some",
            type="insufficient_quota",
            code="insufficient_quota",
            retry=False,
        )
