"""Numbers from observations: the keys of ``vllm bench serve``, and goodput under an SLO.

Pure functions. Definitions (all latencies in ms, from the moment the request was sent):
TTFT = first token, E2EL = last token, TPOT = (E2EL - TTFT) / (tokens - 1), ITL = each gap between
two pieces of text. Goodput = output tokens per second of answers that met every limit of their
SLO. Attainment = answers in time / all offered: refused and failed ones stay in the denominator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from shared.quality import MIN_CE
from shared.slo import Slo

PERCENTILES = (50.0, 90.0, 95.0, 99.0)


class Outcome(msgspec.Struct, kw_only=True):
    """What was seen of one request. Moments in seconds from the start of the run."""

    index: int
    tag: str = ""
    model: str = ""
    sample: str = ""  # id of the sample whose reference belongs to it
    due: float = 0.0  # when the schedule wanted it
    ready: float = 0.0  # when the client got round to it: ready - due is the client's lag
    sent: float = 0.0  # after waiting for --max-concurrency
    first_byte: float | None = None
    first_token: float | None = None
    finished: float = 0.0
    gaps: list[float] = []  # seconds between pieces of text
    asked_prompt: int | None = None  # tokens the schedule asked for
    asked_output: int | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    counted_by: str = ""  # "usage" | "chunks"
    status: int = 0
    error: str | None = None
    refused: bool = False  # the server said no (429, 503): shed
    finish_reason: str | None = None
    headers: dict[str, str] = {}  # x-* of the response
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.sent

    @property
    def e2e(self) -> float:
        return self.finished - self.sent

    @property
    def tpot(self) -> float | None:
        if self.output_tokens < 2 or self.first_token is None:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)

    def met(self, slo: Slo) -> bool:
        """Answered, and within every limit the SLO names."""
        return self.ok and slo.met(self.ttft, self.tpot, self.e2e)


Slos = Mapping[str, Slo]  # tag -> SLO; "" is for every tag not named


def slo_of(slos: Slos, tag: str) -> Slo:
    """The SLO of a tag, else the general one, else none."""
    return slos.get(tag) or slos.get("") or Slo()


def summarise(outcomes: Sequence[Outcome], duration: float, slos: Slos) -> dict[str, Any]:
    """The result's numbers over ``duration`` seconds; None where nothing was measured.

    completed + failed + shed = offered, always. ``goodput_tokens_per_s`` counts the seconds to the
    last answer, ``active_goodput_tokens_per_s`` those to the last arrival or answer in time
    (``active_duration``), as the simulator does: who leaves late answers to the end, when nobody
    else waits, pays nothing for the length of that tail.
    """
    done = [o for o in outcomes if o.ok]
    good = [o for o in done if o.met(slo_of(slos, o.tag))]
    shed = sum(1 for o in outcomes if not o.ok and o.refused)
    tokens_in = sum(o.input_tokens for o in done)
    tokens_out = sum(o.output_tokens for o in done)
    seconds = max(duration, 1e-9)
    active = max([*(o.sent for o in outcomes), *(o.finished for o in good)], default=0.0)
    tokens_good = sum(o.output_tokens for o in good)
    result: dict[str, Any] = {
        "duration": duration,
        "offered": len(outcomes),
        "completed": len(done),
        "failed": len(outcomes) - len(done) - shed,
        "shed": shed,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(done) / seconds,
        "request_goodput": len(good) / seconds,
        "output_throughput": tokens_out / seconds,
        "total_token_throughput": (tokens_in + tokens_out) / seconds,
        "goodput_tokens_per_s": tokens_good / seconds,
        "active_duration": active,
        "active_goodput_tokens_per_s": tokens_good / max(active, 1e-9),
        "slo_attainment": len(good) / len(outcomes) if outcomes else None,
        "q_goodput": None,
        "quality_coverage": None,
    }
    result |= _distribution("ttft", [o.ttft for o in done])
    result |= _distribution("tpot", [o.tpot for o in done])
    result |= _distribution("itl", (gap for o in done for gap in o.gaps))
    result |= _distribution("e2el", [o.e2e for o in done])
    return result


def _distribution(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    """mean, median, std and percentiles in ms; all None when there is no value."""
    numbers = np.array([v for v in values if v is not None]) * 1e3
    keys = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std")]
    keys += [f"p{p:g}_{name}_ms" for p in PERCENTILES]
    if not len(numbers):
        return dict.fromkeys(keys)
    points = np.percentile(numbers, PERCENTILES)
    found = (numbers.mean(), np.median(numbers), numbers.std(), *points)
    return {key: round(float(value), 4) for key, value in zip(keys, found, strict=True)}


def client_health(outcomes: Sequence[Outcome], span: float) -> dict[str, Any]:
    """How well the client kept its own schedule (ms), and whether the run can be trusted.

    The client fell behind when the 99th percentile of its lag exceeds 50 ms and 5 % of the
    median answer's time, or when sending took visibly longer than the schedule.
    """
    lags = np.array([o.ready - o.due for o in outcomes]) * 1e3
    waits = np.array([o.sent - o.ready for o in outcomes]) * 1e3
    if not len(lags):
        return {"client_lag_p50_ms": None, "client_lag_p99_ms": None, "client_behind": False}
    p50, p99 = np.percentile(lags, (50, 99))
    median = float(np.median([o.e2e for o in outcomes])) * 1e3
    limit = max(50.0, 0.05 * median)
    late = float(lags[-1]) > limit and float(lags[-1]) > 0.02 * span * 1e3
    return {
        "client_lag_p50_ms": round(float(p50), 3),
        "client_lag_p99_ms": round(float(p99), 3),
        "client_lag_max_ms": round(float(lags.max()), 3),
        "client_queue_p99_ms": round(float(np.percentile(waits, 99)), 3),
        "client_behind": bool(p99 > limit or late),
    }


def by_second(outcomes: Sequence[Outcome], slos: Slos) -> dict[str, list[float]]:
    """Arrays with one value a second of the run: what was offered, answered, in time, running.

    Output tokens are counted when they arrived (a piece of several tokens evenly), goodput
    tokens when their answer ended.
    """
    length = 1 + int(max((max(o.finished, o.sent) for o in outcomes), default=0.0))
    names = ("offered", "completed", "good", "output_tokens", "goodput_tokens")
    arrays = {name: np.zeros(length) for name in names}
    change = np.zeros(length + 1)
    for o in outcomes:
        start, end = int(o.sent), int(o.finished)
        arrays["offered"][start] += 1
        change[start] += 1
        change[end] -= 1
        _spread_tokens(arrays["output_tokens"], o)
        if o.ok:
            arrays["completed"][end] += 1
            if o.met(slo_of(slos, o.tag)):
                arrays["good"][end] += 1
                arrays["goodput_tokens"][end] += o.output_tokens
    arrays["in_flight"] = np.cumsum(change)[:length]
    return {name: [round(float(v), 3) for v in array] for name, array in arrays.items()}


def _spread_tokens(target: np.ndarray[Any, Any], outcome: Outcome) -> None:
    if outcome.first_token is None or outcome.output_tokens == 0:
        return
    share = outcome.output_tokens / (len(outcome.gaps) + 1)
    moment = outcome.first_token
    target[min(int(moment), len(target) - 1)] += share
    for gap in outcome.gaps:
        moment += gap
        target[min(int(moment), len(target) - 1)] += share


def peak_concurrency(outcomes: Iterable[Outcome]) -> int:
    """Most requests in flight at one moment."""
    changes = sorted(
        change for o in outcomes for change in ((o.sent, 1), (max(o.finished, o.sent), -1))
    )
    running = peak = 0
    for _, step in changes:
        running += step
        peak = max(peak, running)
    return peak


def apply_quality(result: dict[str, Any], cross_entropy: Mapping[int, float]) -> None:
    """Fill ``q_goodput`` and ``quality_coverage`` of a detailed result in place.

    ``cross_entropy``: request index -> nats per token of its reference under the adapter version
    that served it. Quality = 1 / max(CE, 0.05). An answer without a reference adds nothing;
    coverage = scored / completed says how many that were.
    """
    done = [r for r in result["requests"] if r["error"] is None]
    scored = [r for r in done if r["index"] in cross_entropy]
    weighted = sum(
        r["output_tokens"] / max(cross_entropy[r["index"]], MIN_CE) for r in scored if r["good"]
    )
    result["quality_coverage"] = len(scored) / len(done) if done else None
    result["q_goodput"] = weighted / max(result["duration"], 1e-9) if scored else None
