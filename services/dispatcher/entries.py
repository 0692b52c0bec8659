"""A request as the dispatcher keeps it: plain fields read, body untouched."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from services.dispatcher.policies.base import Request
from shared.messages import BODY, Failed, Generate, Lost


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

    def again(self) -> Entry:
        """As it is queued once more: how old it is says nothing of its way here."""
        return replace(self, request=replace(self.request, fresh=False))


class Flight(msgspec.Struct, frozen=True):
    """A released request. ``released`` in Redis seconds."""

    entry: Entry
    replica: str
    released: float


class Refusal(msgspec.Struct, frozen=True):
    """A queued request that ends here; ``reply`` None: nobody waits for it."""

    entry: Entry
    reply: Failed | Lost | None


def misfit(entry: Entry, why: str) -> Refusal:
    """No replica carries it."""
    return _refused(entry, 400, "invalid_request_error", "context_length_exceeded", why)


def overload(entry: Entry, why: str, retry_after: float) -> Refusal:
    """Too much is asked; ``retry_after`` in seconds."""
    kind, code = "service_unavailable_error", "server_is_overloaded"
    return _refused(entry, 503, kind, code, why, retry_after)


def _refused(
    entry: Entry, status: int, kind: str, code: str, why: str, retry_after: float | None = None
) -> Refusal:
    return Refusal(
        entry,
        Failed(
            id=entry.id,
            attempt=entry.attempt,
            status=status,
            code=code,
            message=why,
            type=kind,
            retry_after=retry_after,
        ),
    )


def key_of(request_id: str, attempt: int) -> str:
    """What policies call a request: an attempt of it, so that a late old one is another."""
    return f"{request_id}/{attempt}"


def id_of(key: str) -> str:
    return key.rpartition("/")[0]


def parse(
    stream_id: bytes, fields: Mapping[bytes, bytes], queued: float, *, fresh: bool = True
) -> Entry:
    """``fresh``: it comes straight from its gateway, nobody has kept it waiting.

    Raises BadEntry on a field that is missing or no number.
    """
    try:
        number = _Numbers(fields)
        request_id, attempt = fields[b"id"].decode(), int(fields.get(b"attempt", b"1"))
        generated = int(fields.get(b"generated_tokens") or b"0")
        if not request_id or attempt < 1 or generated < 0:
            raise BadEntry("id, attempt or generated_tokens is out of range")
        request = _request(
            request_id,
            attempt,
            arrival=float(fields[b"arrival"]),
            prompt=int(fields[b"prompt_tokens"]),
            longest=int(fields[b"max_tokens"]),
            generated=generated,
            adapter=_text(fields, b"adapter"),
            adapter_version=_text(fields, b"adapter_version"),
            tenant=_text(fields, b"tenant") or "",
            priority=int(fields.get(b"priority") or b"0"),
            deadline=number(b"deadline"),
            ttft_ms=number(b"ttft_ms"),
            tpot_ms=number(b"tpot_ms"),
            fresh=fresh,
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


def _request(
    request_id: str,
    attempt: int,
    *,
    arrival: float,
    prompt: int,
    longest: int,
    generated: int,
    adapter: str | None,
    adapter_version: str | None,
    tenant: str,
    priority: int,
    deadline: float | None,
    ttft_ms: float | None,
    tpot_ms: float | None,
    fresh: bool = True,
) -> Request:
    """What a policy sees: tokens that were ``generated`` and delivered already count as prompt."""
    return Request(
        id=key_of(request_id, attempt),
        arrival=arrival,
        prompt_tokens=prompt + generated,
        max_tokens=longest - generated,
        adapter=adapter,
        adapter_version=adapter_version,
        tenant=tenant,
        priority=priority,
        deadline=deadline,
        ttft_deadline=None if ttft_ms is None else arrival + ttft_ms / 1e3,
        tpot=None if tpot_ms is None else tpot_ms / 1e3,
        attempt=attempt,
        fresh=fresh,
    )


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
    return Entry(
        id=generate.id,
        attempt=generate.attempt,
        gateway=generate.gateway,
        stream_id=stream_id,
        body=body,
        queued=queued,
        request=_request(
            generate.id,
            generate.attempt,
            arrival=generate.arrival,
            prompt=len(generate.prompt),
            longest=generate.sampling.max_tokens,
            generated=len(generate.generated),
            adapter=generate.adapter,
            adapter_version=generate.adapter_version,
            tenant=generate.tenant,
            priority=generate.priority,
            deadline=generate.deadline,
            ttft_ms=generate.slo.ttft_ms,
            tpot_ms=generate.slo.tpot_ms,
        ),
    )
