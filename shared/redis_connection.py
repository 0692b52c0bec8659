"""redis-py connections that send without ``asyncio.wait_for`` and pack commands in C.

redis-py wraps each send in ``wait_for``: one task a command, and before Python 3.12 a
cancellation that arrives while the send completes is lost, so that a service does not stop.
Its asyncio connections pack commands in Python; hiredis does it ten times faster. And a script that
found no memory is told alike by every version of Redis.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Iterable
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.sentinel import SentinelManagedConnection
from redis.exceptions import (
    ConnectionError,
    DataError,
    OutOfMemoryError,
    ResponseError,
    TimeoutError,
)


class _PromptSend:
    def pack_command(self, *args: Any) -> list[bytes]:
        name = args[0]
        if isinstance(name, str):
            name = name.encode()
        try:
            return [hiredis.pack_command((*name.split(), *args[1:]))]
        except TypeError as e:
            raise DataError(f"{name.decode()}: bytes, str, int and float arguments only") from e

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [packed for command in commands for packed in self.pack_command(*command)]

    async def send_packed_command(self: Any, command: Any, check_health: bool = True) -> None:
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if isinstance(command, str):
            command = command.encode()
        writer: asyncio.StreamWriter = self._writer
        try:
            writer.writelines([command] if isinstance(command, bytes) else command)
            if writer.transport.get_write_buffer_size():
                async with asyncio.timeout(self.socket_timeout):
                    await writer.drain()
        except builtins.TimeoutError:
            await self.disconnect(nowait=True)
            raise TimeoutError("timeout writing to Redis") from None
        except OSError as e:
            await self.disconnect(nowait=True)
            raise ConnectionError(f"error writing to Redis: {e}") from e
        except asyncio.CancelledError:
            await self.disconnect(nowait=True)  # half a command may be on its way
            raise

    async def read_response(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except ResponseError as e:
            # Up to Redis 6.2 a script without memory ends in "Error running script … -OOM …".
            if "-OOM " in str(e) and not isinstance(e, OutOfMemoryError):
                raise OutOfMemoryError(str(e)) from None
            raise


class _Tcp(_PromptSend, Connection):  # type: ignore[misc]
    """``redis://``"""


class _Tls(_PromptSend, SSLConnection):  # type: ignore[misc]
    """``rediss://``"""


class _Unix(_PromptSend, UnixDomainSocketConnection):  # type: ignore[misc]
    """``unix://``"""


class _Sentinel(_PromptSend, SentinelManagedConnection):  # type: ignore[misc]
    """``redis+sentinel://``"""


def send_promptly(client: Redis) -> None:
    """Let a client that has no connection yet open these."""
    pool = client.connection_pool
    kinds = {base: own for own in (_Tcp, _Tls, _Unix, _Sentinel) for base in own.__bases__[1:]}
    pool.connection_class = kinds[pool.connection_class]
