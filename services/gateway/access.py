"""Who is calling: keys, tenants, roles. How much a tenant may: ``limits``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.gateway.errors import ApiError
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


class Access:
    """The keys. Without a keys file everybody is the operator."""

    def __init__(self, path: Path | None) -> None:
        """Raises api_keys.KeysError."""
        self._path = path
        self._keys = None if path is None else api_keys.read(path)
        self._modified = None if path is None else _modified(path)

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
