"""Arrivals of a simulation: traces, random, or a trace stretched over many hours of a day."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from loadgen import arrivals, trace
from loadgen.arrivals import Planned
from loadgen.trace import Row
from services.dispatcher.policies.base import Request
from shared.slo import Slo
from sim.job import Job

Align = Literal["clock", "start"]
Assignment = Literal["zipf", "random", "round-robin"]
# Ranges hold for what is read from a file; `sim.scenario.check` asks them of every scenario.
Above0 = Annotated[float, msgspec.Meta(gt=0)]
From0 = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seed = Annotated[int, msgspec.Meta(ge=0)]


class Stream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Random requests of one kind: gamma gaps, log-normal lengths (median and sigma of the log)."""

    tag: str
    rate: Above0
    burstiness: Above0 = 1.0
    prompt: Above0 = 512.0
    prompt_sigma: From0 = 0.0
    output: Above0 = 64.0
    output_sigma: From0 = 0.0
    longest_prompt: Count = 7500
    longest_output: Count = 2000


# Stand-ins for the 2023 Azure traces (Splitwise, ISCA 2024): rates and variation of requests a
# second of the whole traces, lengths fitted to their first half hour.
AZURE_LIKE = (
    Stream(
        tag="code",
        rate=2.57,
        burstiness=0.075,
        prompt=1460,
        prompt_sigma=1.0,
        output=13,
        output_sigma=0.83,
    ),
    Stream(
        tag="conv",
        rate=5.53,
        burstiness=0.87,
        prompt=1033,
        prompt_sigma=0.8,
        output=134,
        output_sigma=0.9,
    ),
)


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds, tokens. One of ``traces``, ``streams`` and ``rate``."""

    traces: tuple[tuple[str, Path], ...] = ()
    trace_align: Align = "clock"
    streams: tuple[Stream, ...] = ()
    rate: Above0 | None = None
    burstiness: Above0 = 1.0
    prompt_tokens: Count = 512
    output_tokens: Count = 64
    rate_scale: Above0 = 1.0
    prompt_scale: Above0 = 1.0
    output_scale: Above0 = 1.0
    max_prompt: Count | None = None
    max_output: Count | None = None
    limit: Count | None = None
    duration: Above0 | None = None
    repeat: bool = False  # play the traces again and again until ``duration``
    diurnal: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0  # amplitude of the daily rhythm
    day: Above0 = 86_400.0
    seed: Seed = 0
    adapters: tuple[str, ...] = ()
    adapter_assignment: Assignment = "zipf"
    zipf_exponent: From0 = 1.0
    slos: dict[str, Slo] = {}
    lengths_known: bool = True  # max_tokens is the output's length, as in a forced replay
    max_tokens: Count = 1024  # else this is what clients ask for


def planned(work: Workload) -> Iterator[Planned]:
    """When and how long, lazily; bad traces raise TraceError."""
    if work.traces or work.streams:
        rows = _rows(work)
        plan = arrivals.from_trace(
            rows,
            rate_scale=work.rate_scale,
            prompt_scale=work.prompt_scale,
            output_scale=work.output_scale,
            max_prompt=work.max_prompt,
            max_output=work.max_output,
        )
    else:
        assert work.rate is not None, "a workload has traces, streams or a rate"
        plan = arrivals.gamma(
            work.rate * work.rate_scale,
            work.burstiness,
            work.seed,
            prompt_tokens=work.prompt_tokens,
            output_tokens=work.output_tokens,
        )
    if work.diurnal:
        plan = _diurnal(plan, work.diurnal, work.day)
    return arrivals.limited(plan, limit=work.limit, duration=work.duration)


def _rows(work: Workload) -> Iterator[Row]:
    if work.streams:
        drawn = (_drawn(stream, [work.seed, k]) for k, stream in enumerate(work.streams))
        return heapq.merge(*drawn, key=lambda row: row.time)

    def once() -> Iterator[Row]:
        return trace.merge(
            [trace.read(path, tag) for tag, path in work.traces], align=work.trace_align
        )

    return _again_and_again(once) if work.repeat else once()


def _drawn(stream: Stream, seed: list[int]) -> Iterator[Row]:
    """Endless requests of one stream."""
    random, time, n = np.random.default_rng(seed), 0.0, arrivals.CHUNK
    shape, mean = stream.burstiness, 1.0 / stream.rate
    while True:
        gaps = random.gamma(shape, mean / shape, n).tolist()
        prompts = np.exp(random.normal(math.log(stream.prompt), stream.prompt_sigma, n))
        outputs = np.exp(random.normal(math.log(stream.output), stream.output_sigma, n))
        prompts = prompts.clip(1, stream.longest_prompt)
        outputs = outputs.clip(1, stream.longest_output)
        for gap, prompt, output in zip(gaps, prompts.tolist(), outputs.tolist(), strict=True):
            time += gap
            yield Row(time, round(prompt), round(output), stream.tag)


def _again_and_again(once: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """The trace end to end; the gap between two turns is the trace's mean gap."""
    offset = 0.0
    while True:
        last, count = 0.0, 0
        for row in once():
            last, count = row.time, count + 1
            yield row._replace(time=offset + row.time)
        offset += last + last / max(1, count - 1)
        if last <= 0.0:
            return  # a trace of one moment cannot be played on


def _diurnal(plan: Iterator[Planned], amplitude: float, day: float) -> Iterator[Planned]:
    """Stretch and squeeze the gaps so that the rate follows 1 - amplitude * cos(2 pi t / day)."""
    time = last = 0.0
    for item in plan:
        rhythm = 1.0 - amplitude * math.cos(2 * math.pi * time / day)
        time += (item.due - last) / max(rhythm, 1e-3)
        last = item.due
        yield item._replace(due=time)


def jobs(work: Workload) -> Iterator[Job]:
    """Requests in order of arrival, drawn one at a time."""
    if work.adapters:
        names: Iterator[str | None] = arrivals.assign(
            work.adapters, work.adapter_assignment, work.seed, exponent=work.zipf_exponent
        )
    else:
        names = itertools.repeat(None)
    general = work.slos.get("") or Slo()
    for number, due, prompt, output, tag in planned(work):
        slo = work.slos.get(tag, general)
        length = output or work.output_tokens
        request = Request(
            id=f"{number}",
            arrival=due,
            prompt_tokens=prompt or work.prompt_tokens,
            max_tokens=length if work.lengths_known else max(length, work.max_tokens),
            adapter=next(names),
            deadline=None if slo.e2e_ms is None else due + slo.e2e_ms / 1e3,
            ttft_deadline=None if slo.ttft_ms is None else due + slo.ttft_ms / 1e3,
            tpot=None if slo.tpot_ms is None else slo.tpot_ms / 1e3,
        )
        yield Job(request, length, tag, slo, due)
