"""The plain fields of a request's entry in ``requests:<model>``.

Written by the gateway, read by the dispatcher (``services.dispatcher.entries``), legible in
``redis-cli XRANGE``; the whole request lies in ``body`` and travels on untouched.
"""

from __future__ import annotations

from shared.messages import Generate, encode

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
