"""``collm why REPLICA|REQUEST``: the decisions about it, with the numbers behind them."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import msgspec
import typer

from collm import fate
from collm import why as explain
from collm.console import fail, out
from collm.fate import Plain
from collm.moments import of_entry, stamp
from collm.where import DataOption, RedisOption, redis_errors, redis_url
from shared.redis_client import connect

NAME_HELP = "Id of a replica (replica-2) or of an answer, or a request's x-request-id"
HIDDEN = ("id", "kind", "time", "replica")
COURSE = {  # step -> what is said of it
    "came": "came",
    "started": "started",
    "first_token": "first token",
    "per_token": "each further token",
    "ended": "ended",
}


def register(app: typer.Typer) -> None:
    app.command()(why)


class Found(msgspec.Struct, frozen=True):
    """A replica, or what is known of a request."""

    replica: explain.Explanation | None
    decisions: list[Plain]
    waiting: list[Plain]
    now: float  # Redis seconds


def why(
    name: Annotated[str, typer.Argument(help=NAME_HELP)],
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many events")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line")] = False,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Why is this replica idle, training, serving; why did this request go where it went."""
    url = redis_url(redis, data_dir)
    with redis_errors():
        found = asyncio.run(_look(url, name, count))
    if found.replica is None and not found.decisions and not found.waiting:
        fail(
            f"{name!r} is no known replica, no request of that name waits, and no kept release "
            "or refusal names one"
        )
    if as_json:
        plain = {"releases": found.decisions, "waiting": found.waiting}
        print(json.dumps(plain if found.replica is None else msgspec.to_builtins(found.replica)))
    elif found.replica is not None:
        _show_replica(found.replica)
    else:
        _show_request(found)


async def _look(url: str, name: str, count: int) -> Found:
    async with connect(url) as redis:
        replica = await explain.replica(redis, name, count)
        seconds, micros = await redis.time()
        now = float(seconds) + float(micros) / 1e6
        if replica is not None:
            return Found(replica, [], [], now)
        waiting = await fate.waiting(redis, name)  # first: a release in between is found then
        return Found(None, await fate.decisions(redis, name), waiting, now)


def _show_replica(found: explain.Explanation) -> None:
    record = found.record
    since = stamp(record["since"] * 1000)
    _say(f"{found.replica} is {record['state']} since {since} ({record['by']}): {record['why']}")
    _say(
        f"limits: b {record['b']} (b* {record['b_star']}), B {record['B']} "
        f"(B* {record['B_star']}); quality {record['q']:.3f}"
    )
    for event in found.events:
        fields = " ".join(f"{k}={v}" for k, v in event.items() if k not in HIDDEN and v)
        _say(f"{stamp(of_entry(event['id']))} {event['kind']:<14} {fields}")


def _show_request(found: Found) -> None:
    for decision in found.decisions:
        when = stamp(of_entry(decision["id"]))
        if "refused" in decision:
            _say(f"{when} {decision['requests']} was refused: {decision['refused']}")
            continue
        _say(f"{when} released to {decision['replica']} in batch {decision['batch']}")
        _say(f"    together with {decision['requests']}")
        _say(f"    numbers: {decision['numbers']}")
        for key in decision["own"].split():
            _show_course(decision, key)
    for choice in found.waiting:
        _show_waiting(choice, found.now)


def _show_waiting(choice: Plain, now: float) -> None:
    limits = {name: choice.get(f"{name}_ms") for name in ("ttft", "tpot", "e2e")}
    promised = ", ".join(f"{name} {ms} ms" for name, ms in limits.items() if ms)
    came = float(choice.get("arrival") or now)
    _say(
        f"{choice['key']} waits since {stamp(came * 1000)} ({now - came:.1f} s) in "
        f"{choice['stream']}, {choice['ahead']} before it; limits: {promised or 'none'}"
    )


def _show_course(decision: Plain, key: str) -> None:
    for step, words in COURSE.items():
        if said := decision.get(f"{step}:{key}"):
            _say(f"    {key} {words} {said}")
    if f"ended:{key}" not in decision:
        _say(f"    {key} has not ended, or the sample that told of it has gone")


def _say(line: str) -> None:
    out.print(line, markup=False, highlight=False, soft_wrap=True)
