"""(B*, b*) of every Combined replica: the training batch that learns fastest while the cluster
still carries its load; B = 0 when it cannot.

Source: CoLLM (arXiv 2604.16400), coordinator. Replicas are decided in turn, lowest quality
first, each against the rates that the others have at the moment. Rates in requests per second.

One departure: the paper's GOODPUT(B, b*) takes training to run beside b* requests at all times.
Replicas train because there are few requests, and b* makes every micro-step look long whatever
its B, so that large B looks good. Here it is GOODPUT(B, 0); load decides by what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from services.coordinator.goodput import Progress, goodput
from shared.latency import LatencyModel
from shared.rounds import ACCUMULATION

FIRST_CYCLES = 2
# A batch grows by so much a round at most: what lies further beyond the one that was observed is
# extrapolated from few samples (Pollux bounds the growth of a job's GPUs alike).
GROWTH = 2
LOAD_FLOOR = 1 / 60  # requests per second; below it the cluster counts as idle


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the cluster: arrivals, mean lengths, limits."""

    rate: float = 0.0  # requests per second
    prompt: float = 128.0  # tokens
    output: float = 128.0
    budget: float | None = None  # seconds: tau' for b*; None = no SLO
    slo: float | None = None  # seconds: tau
    tpot: float | None = None
    # Lengths of the requests under ``slo`` (0: as of all): a limit that short requests name is
    # not held against the mean of long ones.
    limited_prompt: float = 0.0
    limited_output: float = 0.0
    headroom: float = 0.2  # h


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A dispatchable replica. ``trains`` False: it only serves and is not decided upon."""

    id: str
    model: LatencyModel | None
    b_max: int
    quality: float = 1.0
    trains: bool = False
    B: int = 0
    progress: Progress = Progress()
    B0: int = 4
    B_max: int = 16
    accumulation: int = ACCUMULATION  # micro-batches an optimiser step
    fixed: float = 0.0  # seconds of a round that are not training, a micro-step
    suspended: bool = False  # the dispatcher asked for B = 0


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The decision for one replica with its numbers, for ``events``."""

    B: int
    b: int
    goodput: float = 0.0
    rate: float = 0.0  # what it carries at (b, B)
    needed: float = 0.0  # what the others leave to it
    why: str = ""


def b_star(member: Member, B: int, demand: Demand) -> int:
    """Largest concurrency that keeps the SLO beside micro-batch B; b_max without a model."""
    if member.model is None or (demand.budget is None and demand.tpot is None):
        return member.b_max
    return member.model.b_star(
        math.inf if demand.budget is None else demand.budget,
        B,
        demand.limited_prompt or demand.prompt,
        demand.limited_output or demand.output,
        b_max=member.b_max,
        slo=demand.slo,
        tpot=demand.tpot,
    )


def rate(member: Member, B: int, demand: Demand) -> float:
    """Requests per second at b*(B); unknown (no model) counts as nothing."""
    b = b_star(member, B, demand)
    if member.model is None or b == 0:
        return 0.0
    return member.model.rate(b, B, demand.prompt, demand.output)


def search(members: Sequence[Member], demand: Demand) -> dict[str, Choice]:
    """A choice for every member that trains."""
    current: dict[str, int] = {m.id: m.B if m.trains else 0 for m in members}
    by_id = {m.id: m for m in members}
    rates = {m.id: rate(m, current[m.id], demand) for m in members}
    choices: dict[str, Choice] = {}
    for member in sorted((m for m in members if m.trains), key=lambda m: (m.quality, m.id)):
        others = sum(r for name, r in rates.items() if name != member.id)
        needed = max(0.0, (1 + demand.headroom) * demand.rate - others)
        choice = _best(by_id[member.id], demand, needed)
        choices[member.id] = choice
        rates[member.id] = choice.rate
    return choices


def _best(member: Member, demand: Demand, needed: float) -> Choice:
    """argmax over B of GOODPUT(B, 0) with b*/S >= needed; B = 0 if none qualifies."""
    idle = b_star(member, 0, demand)
    alone = Choice(B=0, b=max(1, idle), rate=rate(member, 0, demand), needed=needed)
    if member.suspended:
        return msgspec.structs.replace(alone, why="the dispatcher asked for B = 0")
    if member.model is None:
        return Choice(B=member.B0, b=member.b_max, needed=needed, why="no latency model yet")
    best: Choice | None = None
    most = min(member.B_max, GROWTH * member.B) if member.B > 0 else member.B_max
    for B in range(1, most + 1):
        b, r = b_star(member, B, demand), rate(member, B, demand)
        if b < 1 or r < needed or _too_slow(member.model, b, B, demand):
            continue
        value = goodput(
            B,
            0.0,
            member.model,
            member.progress,
            B0=member.B0,
            accumulation=member.accumulation,
            fixed=member.fixed,
        )
        if best is None or value > best.goodput:
            best = Choice(B=B, b=b, goodput=value, rate=r, needed=needed)
    if best is None:
        return msgspec.structs.replace(
            alone, why=f"no B keeps {needed:.3f} requests/s within the SLO"
        )
    return msgspec.structs.replace(best, why=f"best training goodput of B = 1..{most}")


def _too_slow(model: LatencyModel, b: int, B: int, demand: Demand) -> bool:
    """Whether requests that keep their SLO without training would miss it beside this B.

    Only asked when there is load: on an idle cluster yielding protects the odd request.
    """
    if demand.slo is None or demand.rate <= LOAD_FLOOR:
        return False
    prompt = demand.limited_prompt or demand.prompt
    return model.service(b, B, prompt, demand.limited_output or demand.output) > demand.slo


def first_steps(local_steps: int, pattern: Sequence[int]) -> int:
    """Optimiser steps of a first round: what it takes to see every batch size FIRST_CYCLES times.

    Its batch sizes are guesses: the sooner it is over, the sooner those that pay are used.
    """
    return min(local_steps, FIRST_CYCLES * len(pattern))


def cycle(B0: int, B_max: int, *, rests: bool = True) -> tuple[int, ...]:
    """Micro-batches of a first round: B0, 0, 2 B0, so that every slope is observed.

    ``rests`` False leaves the 0 out: serving alone is known already.
    """
    twice = min(2 * B0, B_max)
    return (B0, 0, twice) if rests else (B0, twice)
