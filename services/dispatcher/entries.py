"""A request as the dispatcher keeps it: plain fields read, body untouched."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.dispatcher.policies.base import Request
from shared.messages import BODY, Generate


class BadEntry(ValueError):
    """An entry of the request stream that cannot be understood: names the field."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are Redis seconds."""

    id: str
    attempt: int
    gateway: str
    stream_id: bytes
    body: bytes
    queued: float  # when it was read
    request: Request
    taken_from: str = ""  # replica from which it was taken back (preemption)

    @property
    def key(self) -> str:
        return self.request.id


def key_of(request_id: str, attempt: int) -> str:
    """What policies call a request: an attempt of it, so that a late old one is another."""
    return f"{request_id}/{attempt}"


def id_of(key: str) -> str:
    return key.rpartition("/")[0]


def parse(stream_id: bytes, fields: Mapping[bytes, bytes], queued: float) -> Entry:
    """Raises BadEntry on a field that is missing or no number."""
    try:
        number = _Numbers(fields)
        request_id, attempt = fields[b"id"].decode(), int(fields.get(b"attempt", b"1"))
        generated = int(fields.get(b"generated_tokens") or b"0")
        if not request_id or attempt < 1 or generated < 0:
            raise BadEntry("id, attempt or generated_tokens is out of range")
        arrival, ttft, tpot = float(fields[b"arrival"]), number(b"ttft_ms"), number(b"tpot_ms")
        request = Request(
            id=key_of(request_id, attempt),
            arrival=arrival,
            prompt_tokens=int(fields[b"prompt_tokens"]) + generated,
            max_tokens=int(fields[b"max_tokens"]) - generated,
            adapter=_text(fields, b"adapter"),
            adapter_version=_text(fields, b"adapter_version"),
            tenant=_text(fields, b"tenant") or "",
            priority=int(fields.get(b"priority") or b"0"),
            deadline=number(b"deadline"),
            ttft_deadline=None if ttft is None else arrival + ttft / 1e3,
            tpot=None if tpot is None else tpot / 1e3,
            attempt=attempt,
        )
        if request.prompt_tokens < 0 or request.max_tokens < 1:
            raise BadEntry("prompt_tokens or max_tokens is out of range")
        return Entry(
            id=request_id,
            attempt=attempt,
            gateway=fields[b"gateway"].decode(),
            stream_id=stream_id,
            body=fields[BODY],
            queued=queued,
            request=request,
            taken_from=_text(fields, b"taken_from") or "",
        )
    except KeyError as e:
        raise BadEntry(f"field {e.args[0].decode()!r} is missing") from e
    except ValueError as e:  # UnicodeDecodeError is one
        raise BadEntry(str(e)) from e


class _Numbers:
    """Optional numbers of an entry; refuses NaN and infinities, which no comparison survives."""

    def __init__(self, fields: Mapping[bytes, bytes]) -> None:
        self._fields = fields
        for name in (b"arrival", b"deadline", b"ttft_ms", b"tpot_ms", b"e2e_ms"):
            raw = fields.get(name)
            if raw and not abs(float(raw)) < 1e15:
                raise BadEntry(f"field {name.decode()!r} is no finite number: {raw!r}")

    def __call__(self, name: bytes) -> float | None:
        raw = self._fields.get(name)
        return float(raw) if raw else None


def _text(fields: Mapping[bytes, bytes], name: bytes) -> str | None:
    raw = fields.get(name)
    return raw.decode() if raw else None


def of_generate(generate: Generate, stream_id: bytes, body: bytes, queued: float) -> Entry:
    """The entry of a request that lies in a replica's stream already."""
    sampling, slo, arrival = generate.sampling, generate.slo, generate.arrival
    return Entry(
        id=generate.id,
        attempt=generate.attempt,
        gateway=generate.gateway,
        stream_id=stream_id,
        body=body,
        queued=queued,
        request=Request(
            id=key_of(generate.id, generate.attempt),
            arrival=arrival,
            prompt_tokens=len(generate.prompt) + len(generate.generated),
            max_tokens=sampling.max_tokens - len(generate.generated),
            adapter=generate.adapter,
            adapter_version=generate.adapter_version,
            tenant=generate.tenant,
            priority=generate.priority,
            deadline=generate.deadline,
            ttft_deadline=None if slo.ttft_ms is None else arrival + slo.ttft_ms / 1e3,
            tpot=None if slo.tpot_ms is None else slo.tpot_ms / 1e3,
            attempt=generate.attempt,
        ),
    )
