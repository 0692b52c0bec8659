"""The entry of a request stream: plain fields for people and the dispatcher, body for the replica.

``prompt_tokens`` counts what must be prefilled (tokens of earlier attempts included) and
``max_tokens`` what may still come, so that prompt_tokens + max_tokens is the context needed.
"""

from __future__ import annotations

from shared.messages import Generate, encode


def request_fields(request: Generate) -> dict[str, str | bytes]:
    """Fields of the entry that carries ``request``. Absent fields mean "none"."""
    fields: dict[str, str | bytes] = {
        "id": request.id,
        "model": request.model,
        "gateway": request.gateway,
        "arrival": f"{request.arrival:.6f}",
        "prompt_tokens": str(len(request.prompt) + len(request.generated)),
        "max_tokens": str(request.sampling.max_tokens - len(request.generated)),
        "attempt": str(request.attempt),
    }
    optional = {
        "adapter": request.adapter,
        "adapter_version": request.adapter_version,
        "tenant": request.tenant or None,
        "priority": request.priority or None,
        "ttft_ms": request.slo.ttft_ms,
        "tpot_ms": request.slo.tpot_ms,
        "e2e_ms": request.slo.e2e_ms,
    }
    fields.update({name: str(value) for name, value in optional.items() if value is not None})
    if request.deadline is not None:
        fields["deadline"] = f"{request.deadline:.6f}"
    fields["body"] = encode(request)
    return fields
