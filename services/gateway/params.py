"""Parameters checked against their ranges and turned into what the engine takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.gateway.errors import ApiError, bad_value
from services.gateway.wire import Parameters, SloBody
from shared.messages import Sampling
from shared.slo import Slo

MAX_STOPS = 4
LONGEST_STOP = 1000  # characters
SEEDS = 1 << 63
PRIORITIES = 1_000_000  # least and greatest
SLO_HEADERS = (
    (b"x-slo-ttft-ms", "ttft_ms"),
    (b"x-slo-tpot-ms", "tpot_ms"),
    (b"x-slo-e2e-ms", "e2e_ms"),
)
# Parameter -> least and greatest value.
RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 2.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


def check(request: Parameters) -> None:
    """Raises ApiError 400 for a value out of range."""
    for name, least, most in RANGES:
        value = getattr(request, name)
        if value is not None and not least <= value <= most:
            raise bad_value(name, f"{name} must lie between {least:g} and {most:g}, got {value:g}")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise bad_value("top_p", f"top_p must be greater than 0 and at most 1, got {request.top_p}")
    if request.top_k is not None and request.top_k < -1:
        raise bad_value("top_k", f"top_k must be at least 0 (or -1: all), got {request.top_k}")
    if request.repetition_penalty is not None and not 0 < request.repetition_penalty <= 10:
        raise bad_value("repetition_penalty", "repetition_penalty must lie in (0, 10]")
    if request.seed is not None and not -SEEDS <= request.seed < SEEDS:
        raise bad_value("seed", "seed must be a 64-bit integer")
    if not -PRIORITIES <= request.priority <= PRIORITIES:
        raise bad_value("priority", f"priority must lie between -{PRIORITIES} and {PRIORITIES}")
    if request.n is not None and request.n < 1:
        raise bad_value("n", f"n must be at least 1, got {request.n}")
    if request.stream_options is not None and not request.stream:
        raise bad_value("stream_options", "stream_options is allowed only with stream: true")


def stops(request: Parameters) -> tuple[str, ...]:
    """The stop strings. Raises ApiError 400."""
    if request.stop is None:
        return ()
    found = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if len(found) > MAX_STOPS:
        raise bad_value("stop", f"at most {MAX_STOPS} stop strings are allowed, got {len(found)}")
    if any(not s or len(s) > LONGEST_STOP for s in found):
        raise bad_value("stop", f"a stop string has 1 to {LONGEST_STOP} characters")
    return found


def max_tokens(
    named: int | None, param: str, prompt_tokens: int, context: int, fallback: int | None
) -> int:
    """Length of the answer: the named one, else ``fallback``, else what the context leaves.

    Raises ApiError 400: below 1, or context_length_exceeded.
    """
    if named is not None and named < 1:
        raise bad_value(param, f"{param} must be at least 1, got {named}")
    room = context - prompt_tokens
    wanted = named if named is not None else max(1, min(fallback or room, room))
    if prompt_tokens + wanted > context:
        where = "messages" if param != "prompt" else "prompt"
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens; "
            f"{prompt_tokens + wanted} were requested ({prompt_tokens} in the prompt, {wanted} "
            "for the answer). Shorten the prompt or the answer.",
            param=where,
            code="context_length_exceeded",
        )
    return wanted


def sampling(
    request: Parameters,
    length: int,
    eos: frozenset[int],
    vocabulary: int,
    *,
    logprobs: int | None = None,
    grammar: str | None = None,
) -> Sampling:
    """The engine's parameters; ``length`` = max_tokens. Raises ApiError 400."""
    if not 0 <= request.min_tokens <= length:
        raise bad_value("min_tokens", f"min_tokens must lie between 0 and max_tokens ({length})")
    named = request.stop_token_ids or ()
    if any(not 0 <= token < vocabulary for token in named):
        raise bad_value("stop_token_ids", f"a token id lies between 0 and {vocabulary - 1}")
    ends = named if request.ignore_eos else (*eos, *named)
    return Sampling(
        max_tokens=length,
        min_tokens=request.min_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=min(max(0, request.top_k or 0), vocabulary),
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=request.seed,
        stop_token_ids=tuple(ends),
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        grammar=grammar,
    )


def objective(body: SloBody | None, headers: Mapping[bytes, bytes], default: Slo) -> Slo:
    """The request's SLO: its body, then its headers, limit by limit; the model's if it has none.

    Raises ApiError 400 for a limit that is no positive number.
    """
    limits: dict[str, float] = {}
    for header, field in SLO_HEADERS:
        if header in headers:
            limits[field] = _milliseconds(header.decode(), headers[header])
    if body is not None:
        for field in ("ttft_ms", "tpot_ms", "e2e_ms"):
            value = getattr(body, field)
            if value is not None:
                if not 0 < value < float("inf"):
                    raise bad_value(f"slo.{field}", f"slo.{field} must be a positive number")
                limits[field] = value
    return Slo(**limits) if limits else default


def _milliseconds(header: str, raw: bytes) -> float:
    try:
        value = float(raw)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise bad_value(header, f"header {header}: a positive number of milliseconds expected")
    return value


def token_prompt(ids: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """Token ids given by the client. Raises ApiError 400."""
    if not ids:
        raise bad_value("prompt", "the prompt is empty")
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise bad_value("prompt", f"a token id lies between 0 and {vocabulary - 1}")
    return tuple(ids)
