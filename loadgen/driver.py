"""Keeps the schedule: sends every request when it is due, whatever became of the others.

Open loop: a slow server does not slow the arrivals down (``--max-concurrency`` does, and the
time spent waiting for it is reported apart from the client's own lag).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from loadgen.arrivals import Planned, assign
from loadgen.client import Client, HttpError
from loadgen.conversation import Observation
from loadgen.metrics import Outcome, slo_of
from loadgen.options import CHAT, Options
from loadgen.prompts import Prompts, Sample

DEFAULT_OUTPUT = 128  # tokens asked for where neither trace nor --output-tokens says how many


class Prepared(NamedTuple):
    """A request ready to be sent."""

    planned: Planned
    model: str
    sample: Sample
    output_tokens: int
    body: bytes
    headers: dict[str, str]


class Counters:
    """What the progress bar shows."""

    def __init__(self) -> None:
        self.sent = self.running = self.completed = self.failed = self.shed = self.tokens = 0


class Driver:
    """One run. ``outcomes`` are in the order of the schedule."""

    def __init__(
        self,
        options: Options,
        client: Client,
        prompts: Prompts,
        schedule: Iterator[Planned],
        model: str,
    ) -> None:
        self._options, self._client, self._prompts = options, client, prompts
        self._schedule = schedule
        self._samples = iter(prompts)
        names = options.lora_modules or (model,)
        how = options.lora_assignment if options.lora_modules else "round-robin"
        self._models = assign(names, how, options.seed, exponent=options.zipf_exponent)
        limit = options.max_concurrency
        self._slots = asyncio.Semaphore(limit) if limit is not None else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._origin = 0.0
        self.outcomes: list[Outcome] = []
        self.samples: dict[str, Sample] = {}
        self.counters = Counters()
        self.span = 0.0  # seconds the schedule covered
        self.interrupted = False

    async def run(self) -> float:
        """Send everything, wait for every answer; returns the seconds it took."""
        self._origin = time.perf_counter()
        for planned in self._schedule:
            prepared = self._prepare(planned)
            await self._until(planned.due)
            if self._stop.is_set():
                break
            self._start(prepared)
        await self._drain()
        return self._now()

    def stop(self) -> None:
        """Send nothing more and give up what is still running."""
        self.interrupted = True
        self._stop.set()
        for task in self._tasks:
            task.cancel()

    async def warm_up(self, count: int) -> None:
        """Send ``count`` requests, one after the other, that are not counted."""
        for index in range(count):
            prepared = self._prepare(Planned(index, 0.0, 16, 4, "warm-up"))
            outcome = Outcome(index=index)
            await self._exchange(prepared, outcome)
            if not outcome.ok:
                raise HttpError(f"warm-up request failed: {outcome.error}")

    def _now(self) -> float:
        return time.perf_counter() - self._origin

    async def _until(self, due: float) -> None:
        """Sleep until ``due``; when late already, still let the answers be read."""
        wait = due - self._now()
        if wait <= 0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(wait):
                await self._stop.wait()
        except TimeoutError:
            return  # the moment has come

    def _start(self, prepared: Prepared) -> None:
        outcome = Outcome(
            index=prepared.planned.number,
            tag=prepared.planned.tag,
            model=prepared.model,
            sample=prepared.sample.id,
            due=prepared.planned.due,
            ready=self._now(),
            asked_prompt=prepared.planned.prompt_tokens,
            asked_output=prepared.output_tokens,
        )
        self.outcomes.append(outcome)
        self.samples.setdefault(prepared.sample.id, prepared.sample)
        self.span = prepared.planned.due
        self.counters.sent += 1
        task = asyncio.create_task(self._one(prepared, outcome))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self) -> None:
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def _one(self, prepared: Prepared, outcome: Outcome) -> None:
        try:
            if self._slots is None:
                await self._exchange(prepared, outcome)
            else:
                async with self._slots:
                    await self._exchange(prepared, outcome)
        except asyncio.CancelledError:
            if outcome.error is None and not outcome.finished:
                outcome.sent = outcome.sent or outcome.ready
                outcome.finished, outcome.error = self._now(), "the run was interrupted"
        self._tally(outcome)

    async def _exchange(self, prepared: Prepared, outcome: Outcome) -> None:
        keep = self._options.save_detailed
        observation = Observation(outcome, origin=self._origin, keep_text=keep)
        self.counters.running += 1
        outcome.sent = self._now()
        try:
            await self._client.request(
                "POST",
                self._options.endpoint,
                observation,
                body=prepared.body,
                headers=prepared.headers,
                timeout=self._options.timeout,
            )
            observation.complete(time.perf_counter())
        except HttpError as e:
            observation.failed(str(e), time.perf_counter())
        finally:
            self.counters.running -= 1

    def _tally(self, outcome: Outcome) -> None:
        self.counters.tokens += outcome.output_tokens
        if outcome.ok:
            self.counters.completed += 1
        elif outcome.refused:
            self.counters.shed += 1
        else:
            self.counters.failed += 1

    def _prepare(self, planned: Planned) -> Prepared:
        options = self._options
        sample, model = next(self._samples), next(self._models)
        output = planned.output_tokens or DEFAULT_OUTPUT
        messages = self._prompts.messages(sample, planned.prompt_tokens)
        body: dict[str, Any] = {"model": model, "max_tokens": output, "stream": options.stream}
        if options.endpoint == CHAT:
            body["messages"] = messages
        else:
            body["prompt"] = "\n\n".join(m["content"] for m in messages)
        if options.stream:
            body["stream_options"] = {"include_usage": True}
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.temperature is not None:
            body["temperature"] = options.temperature
        body |= options.extra_body
        return Prepared(planned, model, sample, output, orjson.dumps(body), self._slo(planned.tag))

    def _slo(self, tag: str) -> dict[str, str]:
        if not self._options.slo_headers:
            return {}
        slo = slo_of(self._options.slos, tag)
        limits = (("ttft", slo.ttft_ms), ("tpot", slo.tpot_ms), ("e2e", slo.e2e_ms))
        return {f"x-slo-{name}-ms": f"{ms:g}" for name, ms in limits if ms is not None}


class _Buffered:
    """Receiver that keeps a whole response."""

    def __init__(self) -> None:
        self.status, self.body = 0, b""

    def on_response(self, status: int, headers: dict[str, str], now: float) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        self.body += data


async def served(client: Client) -> list[dict[str, Any]]:
    """The cards of ``GET /v1/models``. Raises HttpError when the server does not answer so."""
    answer = _Buffered()
    await client.request("GET", "/v1/models", answer, timeout=30.0)
    if answer.status != 200:
        raise HttpError(f"GET /v1/models: HTTP {answer.status}: {answer.body[:200]!r}")
    try:
        cards = orjson.loads(answer.body)["data"]
        return list(itertools.islice((dict(card) for card in cards), 10_000))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as e:
        raise HttpError(f"GET /v1/models: not a list of models: {answer.body[:200]!r}") from e
