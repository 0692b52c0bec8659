"""A whole system in processes of its own: `collm up` as a user starts it."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import openai
import psutil
import redis

from shared import names
from shared.settings import child_environment

START_SECONDS = 240.0  # patience; a machine that does other work as well starts slowly


class System:
    """`collm up --json`, ready. Leaving the block stops it with Ctrl-C."""

    def __init__(
        self,
        data: Path,
        *options: str,
        variables: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.data = data
        command = [sys.executable, "-m", "collm", "up", "--json", "--data-dir", str(data)]
        self.log = data / "up.log"
        data.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as err:
            self.process = subprocess.Popen(
                [*command, "--port", "0", *options],
                stdout=subprocess.PIPE,
                stderr=err,
                cwd=data,
                env=child_environment(
                    {
                        "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
                        **(variables or {}),
                    }
                ),
            )
        self.facts: dict[str, Any] = {}
        try:
            self.facts = self._await_line(start_seconds)
        finally:
            if not self.facts:  # also when the test's own time limit ends the waiting
                self.process.kill()
                self.process.wait()

    def _await_line(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if readable else b""
        if not line:
            raise AssertionError(f"`collm up` is not ready:\n{self.log.read_text()}")
        return dict(json.loads(line))

    @property
    def url(self) -> str:
        return str(self.facts["url"])

    @property
    def redis_url(self) -> str:
        return str(self.facts["redis"])

    def now(self) -> dict[str, Any]:
        """The facts as they are now."""
        return dict(json.loads((self.data / "run" / "up.json").read_text()))

    def pids(self) -> dict[str, int]:
        """The processes as they are now (a restarted one has another pid)."""
        return dict(self.now()["pids"])

    def collm(self, *arguments: str) -> str:
        """What a command says about this system."""
        command = [sys.executable, "-m", "collm", *arguments, "--data-dir", str(self.data)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60.0, **options
        )

    def queues(self) -> dict[str, Any]:
        """`collm queues --json`."""
        command = [sys.executable, "-m", "collm", "queues", "--json", "--redis", self.redis_url]
        return dict(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))

    def await_drained(self, seconds: float = 90.0) -> dict[str, Any]:
        """Poll `collm queues` until every stream has length 0 and pending 0."""
        end = time.monotonic() + seconds
        while True:
            found = self.queues()
            full = {n: s for n, s in found["streams"].items() if s["length"] or s["pending"]}
            if not full:
                return found
            assert time.monotonic() < end, f"not drained: {full}"

    def await_serving(self, seconds: float = START_SECONDS) -> None:
        """Poll until every replica serves; `collm up` is ready when the first one does."""
        replicas = [part for part in self.pids() if part.startswith("replica")]
        end = time.monotonic() + seconds
        with redis.Redis.from_url(self.redis_url, decode_responses=True) as client:
            while True:
                states = {r: client.hget(names.replica(r), "state") for r in replicas}
                if set(states.values()) == {"serving"}:
                    return
                assert time.monotonic() < end, f"not serving: {states}"
                time.sleep(0.05)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number: int = signal.SIGINT, seconds: float = 60.0) -> int:
        """Send a signal and wait; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(seconds)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def __enter__(self) -> System:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def gone(processes: list[psutil.Process], seconds: float = 60.0) -> list[psutil.Process]:
    """Those of the processes that still live after ``seconds``."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return list(alive)


def hears_ctrl_c() -> None:
    """``preexec_fn`` of a process that is to get SIGINT: what a shell runs in its background, and
    so perhaps this suite, is started with it ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
