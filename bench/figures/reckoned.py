"""What is reckoned from results: the ideal mode, bounds, lulls, times to a loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.figures.runs import Plan
from bench.figures.store import Result
from services.coordinator.search import Demand
from shared import profile

LULL_SHARE = 0.1  # of the intervals: those with the fewest requests


class Ideal(msgspec.Struct, frozen=True, kw_only=True):
    """The ideal mode at the constant mean of what was offered: every replica in use always holds
    the same number of requests, b* = lambda tau, and as many come as end."""

    offered: float  # requests/s, of all
    carried: float  # requests/s of one replica at its best batch
    replicas: dict[str, int]  # policy -> how many it has in use
    level: dict[str, float]  # policy -> lambda, requests/s that each of them ends
    seconds: dict[str, float]  # policy -> tau, of a request of mean length in the replica
    in_flight: dict[str, float]  # policy -> b*


def ideal(plan: Plan, result: Mapping[str, Any]) -> Ideal:
    """By the coefficients of the profile, and rate and mean lengths of the requests of ``result``.

    Round robin has all replicas in use, the pacing policy as few as carry the load and its
    headroom at their best batch; what either of them did with the requests does not go in.
    """
    demand = demanded(result)
    model = profile.load(plan.profile).coefficients
    carried = best_rate(plan, demand.prompt, demand.output)
    few = min(plan.replicas, math.ceil((1 + demand.headroom) * demand.rate / carried))
    replicas = {"round_robin": plan.replicas, "collm": max(1, few)}
    level = {policy: min(carried, demand.rate / count) for policy, count in replicas.items()}
    # tau = empty + slope b and b = lambda tau
    empty = model.service(0, 0, demand.prompt, demand.output)
    slope = model.service(1, 0, demand.prompt, demand.output) - empty
    seconds = {policy: empty / (1 - rate * slope) for policy, rate in level.items()}
    return Ideal(
        offered=demand.rate,
        carried=carried,
        replicas=replicas,
        level=level,
        seconds=seconds,
        in_flight={policy: level[policy] * seconds[policy] for policy in level},
    )


def demanded(result: Mapping[str, Any]) -> Demand:
    """Mean rate (requests/s) and mean lengths (tokens) of a result's requests."""
    done = max(1, result["completed"])
    return Demand(
        rate=result["offered"] / result["duration"],
        prompt=result["total_input_tokens"] / done,
        output=result["total_output_tokens"] / done,
    )


def best_rate(plan: Plan, prompt: float, output: float) -> float:
    """Requests/s of one replica at its best batch, with these lengths and nothing waiting."""
    hardware = profile.load(plan.profile)
    model, sizes = hardware.coefficients, range(1, hardware.b_max + 1)
    return max(model.rate(b, 0, prompt, output) for b in sizes)


def distance(values: Sequence[float], level: float) -> float:
    """Root mean square of what is above or below the level, as a share of it."""
    if not values or level <= 0:
        return math.nan
    return math.sqrt(statistics.fmean((v - level) ** 2 for v in values)) / level


def lull(result: Mapping[str, Any]) -> float:
    """Mean utilisation of the replicas in the tenth of the intervals with the fewest requests.

    A replica that serves and trains in one interval counts with the larger of the two shares:
    what of it falls together is not recorded, so it is at least that.
    """
    series = result["by_time"]
    width, rows = series["utilisation_bucket_seconds"], series["utilisation"]
    offered: dict[int, float] = {}
    for k, requests in enumerate(series["offered"]):
        interval = int(k * series["bucket_seconds"] / width)
        offered[interval] = offered.get(interval, 0.0) + requests
    last = max(k for k, requests in offered.items() if requests)  # and then what is left ends
    calm = sorted(range(max(1, last)), key=lambda k: offered[k])[: max(1, int(last * LULL_SHARE))]
    shares = [
        max(_at(serving, k), _at(training, k))
        for serving, training in zip(rows, series["training"], strict=True)
        for k in calm
    ]
    return statistics.fmean(shares)


def _at(values: Sequence[float], k: int) -> float:
    return values[k] if k < len(values) else 0.0


def completion(pairs: Mapping[str, Result]) -> dict[str, float]:
    """Time to the cross-entropy that every pair reaches, over the coordinator's time."""
    histories = {name: r["training"]["cross_entropy"] for name, r in pairs.items()}
    target = max(history[-1][1] for history in histories.values())
    times = {
        name: next(t for t, ce in history if ce <= target) for name, history in histories.items()
    }
    own = times["coordinator"]
    return {name: t / own if own > 0 else 1.0 for name, t in times.items()}


def fluid_bound(plan: Plan, result: Mapping[str, Any]) -> float:
    """min(offered, what all replicas could carry) in tokens/s; no policy can pass it."""
    demand = demanded(result)
    carried = plan.replicas * best_rate(plan, demand.prompt, demand.output)
    return demand.output * min(demand.rate, carried)
