"""What became of a request: where it waits, how it was released, how it kept its limits."""

from __future__ import annotations

import re

import msgspec
import orjson
from redis.asyncio import Redis

from shared import names
from shared.messages import BODY, DecodeError, Finished, StepSample, decode

PAGE = 500  # entries a read
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")  # of an answer's id
_MARK = re.compile(r"-[0-9a-f]{8}(?:[./]|$)")

Plain = dict[str, str]


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """As the dispatcher notes them in ``limits:<key>``. Seconds."""

    came: float  # before its release
    ttft: float | None
    tpot: float | None
    e2e: float | None


async def decisions(redis: Redis, name: str) -> list[Plain]:
    """Releases (each attempt one) and refusals of a request, oldest first, with their numbers.

    ``name``: its id, an answer's ``id``, or the x-request-id that its client gave. What is known
    of its course is in ``came:<key>``, ``started:``, ``first_token:``, ``ended:``,
    ``per_token:``, for each key in ``own``.
    """
    request_id, found = plain_id(name), list[Plain]()
    upper = "+"
    while page := await redis.xrevrange(names.DECISIONS, max=upper, count=PAGE):
        for entry, fields in page:
            plain = _plain(fields)
            own = [k for k in plain.get("requests", "").split() if is_of(k, request_id)]
            if own:
                found.append({"id": entry.decode(), **plain, "own": " ".join(own)})
        upper = "(" + page[-1][0].decode()
    if found:
        await _add_course(redis, found, request_id)
    return found[::-1]


async def waiting(redis: Redis, name: str) -> list[Plain]:
    """The choices of a request that no replica has got yet, by their place in the stream."""
    request_id, found = plain_id(name), list[Plain]()
    for model in sorted(m.decode() for m in await redis.smembers(names.MODELS)):
        stream, lower, ahead = names.requests(model), "-", 0
        while page := await redis.xrange(stream, min=lower, count=PAGE):
            for place, (entry, fields) in enumerate(page, start=ahead):
                plain = _plain(fields)
                key = f"{plain.get('id', '')}/{plain.get('attempt', '1')}"
                if is_of(key, request_id):
                    more = {"entry": entry.decode(), "stream": stream, "key": key}
                    found.append({**plain, **more, "ahead": str(place)})
            ahead += len(page)
            lower = "(" + page[-1][0].decode()
    return found


def _plain(fields: dict[bytes, bytes]) -> Plain:
    """What a person can read of an entry."""
    return {k.decode(): v.decode(errors="replace") for k, v in fields.items() if k != BODY}


async def _add_course(redis: Redis, found: list[Plain], request_id: str) -> None:
    """Note at each release what became of its members, from the replicas' samples."""
    earliest = found[-1]["id"]
    lower, ends = earliest.split("-")[0], dict[str, tuple[float, Finished]]()
    while page := await redis.xrange(names.METRICS, min=lower, count=PAGE):
        for _, fields in page:
            if fields.get(b"kind", b"").startswith(b"step"):
                ends.update(_ends(fields.get(BODY, b""), request_id))
        lower = "(" + page[-1][0].decode()
    for decision in found:
        for key in decision["own"].split() if "released" in decision else ():
            limits = _limits(decision.get("numbers", ""), key)
            if limits is not None:
                decision[f"came:{key}"] = f"{limits.came:.4f} s before its release"
            if key in ends:
                at, end = ends[key]
                steps = course(float(decision["released"]), limits, at, end)
                decision.update({f"{step}:{key}": words for step, words in steps.items()})


def course(released: float, limits: Limits | None, at: float, end: Finished) -> Plain:
    """Step -> when it was and how that compares with the limit, in words. ``at``: its end."""
    since = "after its release" if limits is None else "after it came"
    limits = limits or Limits(0.0, None, None, None)
    origin, told = released - limits.came, Plain()
    if end.started:
        told["started"] = f"{end.started - released:.4f} s after its release"
    if end.first_token:
        seconds = end.first_token - origin
        # What a later attempt goes on with is not the first that its client saw.
        limit = limits.ttft if end.attempt == 1 else None
        told["first_token"] = f"{seconds:.4f} s {since}" + _against(seconds, limit)
    what = f"{end.output_tokens} tokens, {end.reason}"
    told["ended"] = f"{at - origin:.4f} s {since}: {what}" + _against(at - origin, limits.e2e)
    if end.first_token and end.output_tokens > 1:
        seconds = (at - end.first_token) / (end.output_tokens - 1)
        told["per_token"] = f"{seconds:.4f} s" + _against(seconds, limits.tpot)
    return told


def _against(seconds: float, limit: float | None) -> str:
    if limit is None:
        return ""
    verdict = "kept" if seconds <= limit else f"missed by {seconds - limit:.4f} s"
    return f" (limit {limit:g} s: {verdict})"


def _limits(numbers: str, key: str) -> Limits | None:
    """None: an older record, or a damaged one."""
    try:
        return msgspec.convert(orjson.loads(numbers)[f"limits:{key}"], Limits)
    except (orjson.JSONDecodeError, msgspec.ValidationError, KeyError, TypeError):
        return None


def _ends(body: bytes, request_id: str) -> dict[str, tuple[float, Finished]]:
    """Key -> (Redis seconds, its end) of the request's choices that ended in a step."""
    try:
        sample = decode(body, StepSample)
    except DecodeError:
        return {}  # the dispatcher reports it
    return {
        f"{f.id}/{f.attempt}": (sample.time, f) for f in sample.finished if is_of(f.id, request_id)
    }


def is_of(key: str, request_id: str) -> bool:
    """``key`` is <request id>.<choice>/<attempt>; a shorter id means all below it.

    The gateway adds a mark to an x-request-id that a client gives: those of all such requests.
    """
    if key == request_id or key.startswith((request_id + ".", request_id + "/")):
        return True
    rest = key.removeprefix(request_id) if key.startswith(request_id) else ""
    return _MARK.match(rest) is not None


def plain_id(name: str) -> str:
    """The request id in what a client sees: an answer's ``id`` is that with a prefix."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
