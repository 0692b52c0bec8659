"""What has to be free, or there, before anything starts."""

from __future__ import annotations

import fcntl
import socket
from pathlib import Path
from typing import IO

from redis.exceptions import RedisError

from collm.up.errors import UpError
from services.gateway.settings import GatewaySettings
from shared.redis_client import TRANSIENT, connect

OLDEST_REDIS = (6, 2)
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def lock_data(data: Path) -> IO[str]:
    """Keep a second runner off the folder; held until closed. Raises UpError."""
    run = data / "run"
    run.mkdir(parents=True, exist_ok=True)
    lock = (run / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        lock.close()
        raise UpError(
            f"{data} is in use by another `collm up`; stop it or choose another --data-dir"
        ) from e
    return lock


def check_open(settings: GatewaySettings) -> None:
    """Whether the gateway may listen where it is told to. Raises UpError.

    It would listen on loopback instead, and nobody would find it where it was asked for.
    """
    hosts = {"--host": settings.host}
    if settings.admin_port is not None:
        hosts["gateway.admin_host"] = settings.admin_host
    for option, host in hosts.items():
        if not settings.may_listen(host):
            raise UpError(
                f"{option} {host}: others can reach that address, and without keys everybody "
                "would be the operator. Make keys (`collm keys create --tenant NAME --file "
                "keys.json`) and set COLLM_API_KEYS_FILE=keys.json; or, where others are kept "
                "out by other means, set COLLM_GATEWAY_ALLOW_OPEN=true"
            )


def claim_port(host: str, port: int) -> int:
    """The port to listen on (any free one for 0). Raises UpError when it is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            raise UpError(
                f"cannot listen on {host}:{port}: {e.strerror}; choose another --port or --host"
            ) from e
        return int(s.getsockname()[1])


def address(host: str, port: int) -> str:
    """URL under which this machine reaches what listens there."""
    host = EVERYWHERE.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def check_redis(url: str) -> None:
    """Whether an existing Redis answers and is new enough. Raises UpError."""
    try:
        client = connect(url)
    except ValueError as e:
        raise UpError(str(e)) from e
    shown = url.split("@")[-1]
    try:
        info = await client.info("server")
    except (*TRANSIENT, RedisError) as e:
        raise UpError(f"Redis at {shown} does not answer: {e}") from e
    finally:
        await client.aclose()
    version = str(info["redis_version"])
    if tuple(int(p) for p in version.split(".")[:2]) < OLDEST_REDIS:
        raise UpError(f"Redis at {shown} is {version}; 6.2 or newer is needed")
