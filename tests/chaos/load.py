"""Clients: streaming and not, base and adapters, some of them leave early."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httpx

PROMPT_POOL = 12
CONNECTION_ERRORS = (httpx.TransportError,)


@dataclass
class Record:
    """One request as its client saw it. Monotonic seconds."""

    number: int
    model: str
    prompt: tuple[int, ...]
    tokens: int
    stream: bool
    started: float
    ended: float = 0.0
    outcome: str = "open"  # answered | error | broken | unreachable (never accepted) | left
    status: int = 0
    version: str | None = None
    text: str = ""
    detail: str = ""
    gaps: float = 0.0  # longest silence between two chunks
    faults: list[str] = field(default_factory=list)  # contract violations seen by the client


class Load:
    """``workers`` clients in closed loop; ``stop`` lets each finish what it has begun."""

    def __init__(self, url: str, models: Sequence[str], *, workers: int, seed: int) -> None:
        self._url, self._models, self._workers = url, list(models), workers
        self._random = random.Random(seed)
        self._prompts = [
            tuple(self._random.randrange(35, 120) for _ in range(self._random.randrange(4, 60)))
            for _ in range(PROMPT_POOL)
        ]
        self.records: list[Record] = []
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=self._workers * 2)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=90.0, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for i in range(self._workers):
                group.create_task(self._worker(client, random.Random(i)))

    def stop(self) -> None:
        self._stopping.set()

    def counts(self) -> Counter[str]:
        return Counter(r.outcome for r in self.records)

    async def _worker(self, client: httpx.AsyncClient, dice: random.Random) -> None:
        while not self._stopping.is_set():
            record = Record(
                number=len(self.records),
                model=dice.choice(self._models),
                prompt=dice.choice(self._prompts),
                tokens=dice.choice((8, 24, 60, 120)),
                stream=dice.random() < 0.6,
                started=time.monotonic(),
            )
            self.records.append(record)
            leaves = dice.random() < 0.05
            try:
                await self._ask(client, record, leave=leaves)
            except CONNECTION_ERRORS as e:
                never = isinstance(e, httpx.ConnectError | httpx.ConnectTimeout)
                record.outcome = "unreachable" if never else "broken"
                record.detail = f"{type(e).__name__}: {e}"
            record.ended = time.monotonic()
            if record.outcome in ("broken", "unreachable", "error"):
                await self._pause(dice.uniform(0.1, 0.5))

    async def _pause(self, seconds: float) -> None:
        """A client that was refused does not hammer."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _ask(self, client: httpx.AsyncClient, record: Record, *, leave: bool) -> None:
        body = {
            "model": record.model,
            "prompt": list(record.prompt),
            "max_tokens": record.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": record.stream,
        }
        if not record.stream:
            await self._ask_whole(client, record, body, leave=leave)
            return
        async with client.stream("POST", "/v1/completions", json=body) as response:
            record.status = response.status_code
            if response.status_code != 200:
                self._refused(record, await response.aread())
                return
            record.version = response.headers.get("x-collm-adapter-version")
            await self._read_stream(response, record, leave=leave)

    async def _ask_whole(
        self, client: httpx.AsyncClient, record: Record, body: dict[str, object], *, leave: bool
    ) -> None:
        if leave:
            try:
                async with asyncio.timeout(0.05):
                    response = await client.post("/v1/completions", json=body)
            except TimeoutError:
                record.outcome = "left"
                return
        else:
            response = await client.post("/v1/completions", json=body)
        record.status = response.status_code
        if response.status_code != 200:
            self._refused(record, response.content)
            return
        record.version = response.headers.get("x-collm-adapter-version")
        answer = response.json()
        record.text = answer["choices"][0]["text"]
        record.outcome = "answered"
        if answer["usage"]["completion_tokens"] != record.tokens:
            record.faults.append(f"{answer['usage']['completion_tokens']} tokens in usage")
        if answer["model"] != record.model:
            record.faults.append(f"answered by model {answer['model']}")

    async def _read_stream(self, response: httpx.Response, record: Record, *, leave: bool) -> None:
        last, finished = time.monotonic(), False
        async for line in _lines(response):
            if not line.startswith("data: "):
                continue
            now = time.monotonic()
            record.gaps, last = max(record.gaps, now - last), now
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                record.outcome = "answered"
                if not finished:
                    record.faults.append("[DONE] without a finish_reason")
                return
            try:
                chunk = json.loads(data)
            except json.JSONDecodeError:
                record.outcome, record.detail = "broken", "the stream ended within a line"
                return
            if "error" in chunk:
                self._refused(record, data.encode())
                return
            choice = chunk["choices"][0]
            record.text += choice["text"]
            finished = finished or choice["finish_reason"] is not None
            if leave:
                record.outcome = "left"
                return
        record.outcome = "broken"
        record.detail = "the stream ended without [DONE] and without an error"

    def _refused(self, record: Record, raw: bytes) -> None:
        record.outcome = "error"
        try:
            error = json.loads(raw)["error"]
            record.detail = f"{record.status} {error['code']}: {error['message']}"
            if set(error) < {"message", "type", "param", "code"}:
                record.faults.append(f"error object has only {sorted(error)}")
        except (ValueError, KeyError, TypeError):
            record.faults.append(f"no error object: {raw[:200]!r}")


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines as server-sent events count them; httpx's own also end at U+2028 and the like, which
    stand unescaped in an answer."""
    rest = b""
    async for part in response.aiter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.decode()
