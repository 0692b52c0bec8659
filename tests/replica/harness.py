"""A replica as a real process, and a test that plays dispatcher and gateway for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from redis.asyncio import Redis

from collm.parent import die_with_parent
from shared import names
from shared.messages import (
    BODY,
    Batch,
    Failed,
    Generate,
    Lost,
    Message,
    Output,
    Sampling,
    StepReply,
    StepSample,
    decode,
    decode_any,
    encode,
)
from shared.records import ReplicaRecord

GATEWAY = "gw"
ROOT = Path(__file__).resolve().parent.parent.parent

PROFILE = """
name: test
source: made for tests
coefficients: {alpha0: %(token)s, pi0: %(token)s}
b_max: 64
context: 4096
vocabulary: 259
output_mean: 8
"""


def profile(folder: Path, token_seconds: float) -> Path:
    """A profile whose every step takes ``token_seconds``."""
    path = folder / f"profile-{token_seconds}.yaml"
    path.write_text(PROFILE % {"token": token_seconds})
    return path


def generate(request_id: str, **changes: Any) -> Generate:
    """A request of four prompt tokens; ``tokens`` is its max_tokens."""
    tokens = changes.pop("tokens", 4)
    sampling = changes.pop("sampling", Sampling(max_tokens=tokens, temperature=0, ignore_eos=True))
    values: dict[str, Any] = {
        "id": request_id,
        "gateway": GATEWAY,
        "model": "m",
        "prompt": (10, 11, 12, 13),
        "sampling": sampling,
        "arrival": time.time(),
    }
    return Generate(**{**values, **changes})


class Process:
    """``python -m services.replica`` with settings from the environment."""

    def __init__(self, redis_url: str, data_dir: Path, **settings: Any) -> None:
        base = {"ID": "replica-0", "MODEL": "m", "ENGINE": "emulated"}
        values = {**base, **{k.upper(): v for k, v in settings.items()}}
        keep = {k: v for k, v in os.environ.items() if not k.startswith("COLLM_")}
        variables = {f"COLLM_REPLICA_{k}": str(v) for k, v in values.items()}
        env = {**keep, **variables, "COLLM_REDIS_URL": redis_url, "COLLM_DATA_DIR": str(data_dir),
               "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # fmt: skip
        data_dir.mkdir(parents=True, exist_ok=True)
        self.log = data_dir / f"log-{time.monotonic_ns()}"
        self._sink = self.log.open("wb")
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "services.replica"],
            env=env,
            stderr=self._sink,
            stdout=self._sink,
            cwd=data_dir,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )

    def children(self) -> dict[str, psutil.Process]:
        """Name of the child -> process (by what it runs)."""
        found = {}
        for child in psutil.Process(self.popen.pid).children():
            with contextlib.suppress(psutil.Error):
                line = " ".join(child.cmdline())
                if "spawn_main" in line:
                    found[f"child-{child.pid}"] = child
        return found

    def stop(self) -> int:
        """SIGTERM, wait; kills after 30 s."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        self._sink.close()
        return self.popen.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            for child in psutil.Process(self.popen.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.resume()
        self.popen.kill()
        self.popen.wait()
        self._sink.close()


@contextlib.contextmanager
def running(redis_url: str, data_dir: Path, **settings: Any) -> Iterator[Process]:
    process = Process(redis_url, data_dir, **settings)
    try:
        yield process
    except BaseException:
        print(process.log.read_text())
        raise
    finally:
        process.stop()


async def until(condition: Callable[[], Awaitable[Any]], what: str, seconds: float = 120.0) -> Any:
    """Poll until the condition gives something true; fails with ``what`` after ``seconds``."""
    end = time.monotonic() + seconds
    while not (found := await condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)
    return found


class Cluster:
    """The other side of the streams: releases batches, reads replies and samples."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self._seen = "0"
        self.replies: list[Message] = []

    async def record(self, replica: str = "replica-0") -> ReplicaRecord:
        return ReplicaRecord.from_hash(await self.redis.hgetall(names.replica(replica)))

    async def serving(self, replica: str = "replica-0", not_incarnation: str = "") -> ReplicaRecord:
        async def serves() -> ReplicaRecord | None:
            record = await self.record(replica)
            known = record.state == "serving" and record.context
            return record if known and record.incarnation != not_incarnation else None

        found: ReplicaRecord = await until(serves, f"{replica} serves", 240.0)
        return found

    async def release(self, *requests: Generate | bytes, replica: str = "replica-0") -> bytes:
        bodies = tuple(r if isinstance(r, bytes) else encode(r) for r in requests)
        now = time.time()
        batch = Batch(id="b", released=now, queued=(now,) * len(bodies), requests=bodies)
        entry: bytes = await self.redis.xadd(names.batches(replica), {BODY: encode(batch)})
        return entry

    async def command(self, message: Message, replica: str = "replica-0") -> None:
        await self.redis.xadd(names.control(replica), {BODY: encode(message)})

    async def read(self) -> None:
        for entry, fields in await self.redis.xrange(names.replies(GATEWAY), min=f"({self._seen}"):
            self._seen = entry.decode()
            self.replies.append(decode_any(fields[BODY]))

    async def outputs(self, request_id: str, attempt: int = 1) -> list[Output]:
        await self.read()
        steps = [r for r in self.replies if isinstance(r, StepReply)]
        return [o for s in steps for o in s.outputs if o.id == request_id and o.attempt == attempt]

    async def tokens(self, request_id: str, attempt: int = 1) -> tuple[int, ...]:
        """All tokens by offset without a gap; duplicates are dropped as a gateway does."""
        found: list[int] = []
        for output in await self.outputs(request_id, attempt):
            if not found and output.offset:
                found = [-1] * output.offset
            assert output.offset <= len(found), f"gap before offset {output.offset}"
            found[output.offset :] = output.tokens
        return tuple(found)

    async def finish(self, request_id: str, attempt: int = 1, seconds: float = 120.0) -> Output:
        async def last() -> Output | None:
            found = await self.outputs(request_id, attempt)
            return found[-1] if found and found[-1].finish else None

        found: Output = await until(last, f"{request_id} ends", seconds)
        return found

    async def told(self, kind: type[Failed] | type[Lost], request_id: str) -> Any:
        async def found() -> Message | None:
            await self.read()
            return next(
                (r for r in self.replies if isinstance(r, kind) and r.id == request_id), None
            )

        return await until(found, f"{kind.__name__} for {request_id}")

    async def drained(self, replica: str = "replica-0") -> None:
        async def empty() -> bool:
            return await self.redis.xlen(names.batches(replica)) == 0

        await until(empty, "batch stream empty")

    async def samples(self) -> list[StepSample]:
        found = []
        for _, fields in await self.redis.xrange(names.METRICS):
            if fields[b"kind"] == b"step":
                found.append(decode(fields[BODY], StepSample))
        return found

    async def left(self, request_id: str) -> str:
        """Why a request left the engine, as its samples tell."""

        async def reason() -> str | None:
            for sample in await self.samples():
                for finished in sample.finished:
                    if finished.id == request_id:
                        return finished.reason
            return None

        found: str = await until(reason, f"{request_id} leaves")
        return found
