"""The plain fields of a request's entry in ``requests:<model>``.

Written by the gateway, read by the dispatcher, legible in ``redis-cli XRANGE``; the whole
request lies in ``body`` and travels on untouched.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shared.messages import Generate, encode
from shared.slo import Slo

# Order of the fields in an entry. An absent value is an empty text.
FIELDS = (
    "id",
    "model",
    "adapter",
    "adapter_version",
    "tenant",
    "gateway",
    "attempt",
    "priority",
    "arrival",
    "deadline",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
    "prompt_tokens",
    "max_tokens",
    "generated_tokens",
    "body",
)


class RequestEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What the dispatcher knows of a request. Redis seconds, milliseconds, tokens."""

    id: str
    model: str
    adapter: str | None
    adapter_version: str | None
    tenant: str
    gateway: str
    attempt: int
    priority: int
    arrival: float
    deadline: float | None
    slo: Slo
    prompt_tokens: int
    max_tokens: int
    generated_tokens: int  # of max_tokens, delivered by earlier attempts
    body: bytes


def request_values(request: Generate) -> list[str | bytes]:
    """Field, value, field, value, … of a request's entry, as XADD takes them."""
    slo = request.slo
    values: tuple[str | bytes, ...] = (
        request.id,
        request.model,
        request.adapter or "",
        request.adapter_version or "",
        request.tenant,
        request.gateway,
        str(request.attempt),
        str(request.priority),
        f"{request.arrival:.6f}",
        "" if request.deadline is None else f"{request.deadline:.6f}",
        "" if slo.ttft_ms is None else f"{slo.ttft_ms:g}",
        "" if slo.tpot_ms is None else f"{slo.tpot_ms:g}",
        "" if slo.e2e_ms is None else f"{slo.e2e_ms:g}",
        str(len(request.prompt)),
        str(request.sampling.max_tokens),
        str(len(request.generated)),
        encode(request),
    )
    flat: list[str | bytes] = []
    for name, value in zip(FIELDS, values, strict=True):
        flat += (name, value)
    return flat


def request_entry(raw: Mapping[bytes, bytes]) -> RequestEntry:
    """The entry behind raw stream fields. Raises ValueError naming the field at fault."""
    try:
        text = {name: raw[name.encode()].decode() for name in FIELDS[:-1]}
        return RequestEntry(
            id=text["id"],
            model=text["model"],
            adapter=text["adapter"] or None,
            adapter_version=text["adapter_version"] or None,
            tenant=text["tenant"],
            gateway=text["gateway"],
            attempt=int(text["attempt"]),
            priority=int(text["priority"]),
            arrival=float(text["arrival"]),
            deadline=_number(text["deadline"]),
            slo=Slo(
                ttft_ms=_number(text["ttft_ms"]),
                tpot_ms=_number(text["tpot_ms"]),
                e2e_ms=_number(text["e2e_ms"]),
            ),
            prompt_tokens=int(text["prompt_tokens"]),
            max_tokens=int(text["max_tokens"]),
            generated_tokens=int(text["generated_tokens"]),
            body=raw[b"body"],
        )
    except KeyError as e:
        raise ValueError(f"request entry has no field {e.args[0]!r}") from e


def _number(text: str) -> float | None:
    return float(text) if text else None
