"""The whole system under measurement: ``collm up`` with three replicas that hold private data.

What it does is read from its own records afterwards: events, metrics, registry.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from redis import Redis
from rq.registry import FinishedJobRegistry

from bench.stack import Stack, running
from shared import data_homes, names
from shared.adapters import AdapterRegistry, AdapterVersion
from shared.messages import BODY, StepSample, decode
from shared.redis_client import connect, connect_sync
from shared.tail import just_before

ADAPTER = "bench"


class NothingHappened(RuntimeError):
    """The system did not do in time what is measured; the message says what was seen."""


@dataclass
class System:
    """A running system with its Redis."""

    stack: Stack
    redis: Redis
    model: str
    url: str  # of the API, with /v1

    def events(self, kind: str) -> list[dict[str, str]]:
        """All events of a kind; ``at`` is the entry's Redis time in seconds."""
        found = []
        for entry, fields in self.redis.xrange(names.EVENTS):
            plain = {k.decode(): v.decode() for k, v in fields.items()}
            if plain.get("kind") == kind:
                found.append({**plain, "at": str(int(entry.split(b"-")[0]) / 1000)})
        return found

    def wait(self, kind: str, count: int, seconds: float) -> list[dict[str, str]]:
        """Until there are ``count`` events of a kind. Raises NothingHappened."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if len(found := self.events(kind)) >= count:
                return found
            time.sleep(0.2)
        last = [e for k in ("session_waits", "round_failed", "session_ended", "client_failed")
                for e in self.events(k)][-3:]  # fmt: skip
        raise NothingHappened(f"no {count} {kind!r} events within {seconds:.0f} s; last: {last}")

    def steps(self) -> list[StepSample]:
        """All inference samples of the metrics stream."""
        found = []
        for _, fields in self.redis.xrange(names.METRICS):
            if fields.get(b"kind") == b"step":
                found.append(decode(fields[BODY], StepSample))
        return found

    @contextmanager
    def loaded(self, prompts: Sequence[str], rate: float, tokens: int) -> Iterator[None]:
        """Requests for the base model at ``rate`` a second while the block runs; then all of
        them are answered."""
        ready, loops = threading.Event(), list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()

        async def run() -> None:
            stop = asyncio.Event()
            loops.append((asyncio.get_running_loop(), stop))
            ready.set()
            await open_loop(self.url, self.model, list(prompts), rate, stop, tokens)

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        ready.wait()
        try:
            yield
        finally:
            loop, stop = loops[0]
            loop.call_soon_threadsafe(stop.set)
            thread.join()

    def wait_prepared(self, seconds: float) -> None:
        """Until every training process has done a job: the one that makes its data ready.

        Raises NothingHappened.
        """
        replicas = [part for part in self.stack.pids if part.startswith("replica")]
        done = [FinishedJobRegistry(names.train_queue(r), self.redis) for r in replicas]
        end = time.monotonic() + seconds
        while not all(registry.count for registry in done):
            if time.monotonic() > end:
                raise NothingHappened(f"training data was not prepared within {seconds:.0f} s")
            time.sleep(0.1)

    def versions(self) -> list[AdapterVersion]:
        async def read() -> list[AdapterVersion]:
            async with connect(self.stack.redis) as redis:
                return await AdapterRegistry(redis, self.stack.data_dir).versions(ADAPTER)

        return asyncio.run(read())

    def add_data(self, domains: Mapping[str, Path]) -> None:
        """One domain a replica, all at once."""
        asyncio.run(self._add(domains))

    async def _add(self, domains: Mapping[str, Path]) -> None:
        async with connect(self.stack.redis) as redis:
            since, tickets = await just_before(redis), []
            for i, (domain, file) in enumerate(domains.items()):
                raw, home = file.read_bytes(), f"replica-{i}"
                ticket = await data_homes.send(redis, home, ADAPTER, domain, raw, file.suffix)
                tickets.append(ticket)
            found = await data_homes.answers(redis, tickets, since, 60.0)
        bad = [f["why"] for f in found.values() if f["ok"] != "1"]
        if bad or len(found) < len(tickets):
            raise NothingHappened(f"training data was not stored: {bad or 'no answer'}")


@contextmanager
def system(
    model: str, training: Mapping[str, Any], *, window: int = 3, **coordinator: Any
) -> Iterator[System]:
    """``collm up`` with three replicas, short launcher windows and these training options."""
    environment = {
        "COLLM_LAUNCHER_WINDOW": str(window),
        "COLLM_LAUNCHER_WINDOW_MIN": str(window),
        "COLLM_LAUNCHER_WINDOW_MAX": str(window),
        "COLLM_COORDINATOR_TRAINING": json.dumps(dict(training)),
        **{f"COLLM_COORDINATOR_{k.upper()}": str(v) for k, v in coordinator.items()},
    }
    with running(["--model", f"{model}:3"], environment) as stack:
        redis = connect_sync(stack.redis, socket_timeout=60.0)
        url = stack.url.rstrip("/").removesuffix("/v1") + "/v1"
        try:
            served = httpx.get(f"{url}/models", timeout=30.0).json()["data"][0]["id"]
            yield System(stack, redis, served, url)
        finally:
            redis.close()


# ---------------------------------------------------------------- load


@dataclass(frozen=True)
class Answered:
    """One answer: seconds, tokens, the adapter version that gave it."""

    seconds: float
    tokens: int
    version: str


async def open_loop(
    url: str, model: str, prompts: list[str], rate: float, stop: asyncio.Event, tokens: int
) -> list[Answered]:
    """Poisson arrivals of ``rate`` a second (seeded) until ``stop``; all answers are awaited."""
    rng, found = random.Random(0), list[Answered]()
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as http:

        async def one(prompt: str) -> None:
            found.append(await ask(http, model, prompt, tokens))

        async with asyncio.TaskGroup() as group:
            turn = 0
            while not stop.is_set():
                group.create_task(one(prompts[turn % len(prompts)]))
                turn += 1
                try:
                    async with asyncio.timeout(rng.expovariate(rate)):
                        await stop.wait()
                except TimeoutError:
                    continue  # the next arrival
    return found


async def ask(http: httpx.AsyncClient, model: str, prompt: str, tokens: int) -> Answered:
    """One chat completion of exactly ``tokens`` tokens; a refusal counts as no tokens."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    begun = time.monotonic()
    reply = await http.post("/chat/completions", json=body)
    seconds = time.monotonic() - begun
    if reply.status_code != 200:
        return Answered(seconds, 0, "")
    version = reply.headers.get("x-collm-adapter-version", "")
    return Answered(seconds, reply.json()["usage"]["completion_tokens"], version)
