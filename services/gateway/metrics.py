"""Prometheus metrics under vLLM's names with the prefix ``collm_``.

The busy path only bisects and adds; text is made when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry

from shared.buckets import LATENCY, PER_TOKEN, TOKENS, TTFT
from shared.lifetime import Stamp

if TYPE_CHECKING:
    from services.gateway.answer import Answer, Choice

CHOICES = (1, 2, 5, 10, 20)
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Request received to first token", TTFT),
    "request_time_per_output_token_seconds": ("Mean time of a token after the first", PER_TOKEN),
    "inter_token_latency_seconds": ("Mean time between tokens, per request", PER_TOKEN),
    "e2e_request_latency_seconds": ("Request received to last token", LATENCY),
    "request_queue_time_seconds": ("Received to the start of its prefill", LATENCY),
    "request_inference_time_seconds": ("Start of its prefill to last token", LATENCY),
    "request_prefill_time_seconds": ("Start of its prefill to first token", LATENCY),
    "request_decode_time_seconds": ("First to last token", LATENCY),
    "request_prompt_tokens": ("Prompt length", TOKENS),
    "request_generation_tokens": ("Answer length", TOKENS),
    "request_params_max_tokens": ("max_tokens of requests", TOKENS),
    "request_params_n": ("n of requests", CHOICES),
}
SLO_WINDOW = 1000  # requests that the attainment gauge looks back on

Series = tuple[str, str]  # model name, engine


class Histogram:
    """Counts by bucket and a sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        names = [*(f"{b:g}" for b in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class _Model:
    """Everything counted for one model."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(b) for name, (_, b) in HISTOGRAMS.items()}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[str, int] = {}
        self.slo: deque[bool] = deque(maxlen=SLO_WINDOW)
        self.slo_met = 0
        self.slo_missed = 0


class Metrics(Collector):
    """All numbers of this gateway. ``in_flight`` and ``streams`` are asked at a scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._models: dict[Series, _Model] = {}
        self._rejected: dict[str, int] = {}
        self._responses: dict[int, int] = {}
        self._lost = 0
        self.in_flight: Callable[[], dict[Series, list[int]]] = dict
        self.streams: dict[str, int] = {}  # stream -> length, set before a scrape

    def ended(self, choice: Choice, answer: Answer) -> None:
        """Enter a choice that has ended, whichever way."""
        card = choice.model.card
        model = self._models.get((card.name, card.engine))
        if model is None:
            model = self._models[(card.name, card.engine)] = _Model()
        reason = choice.finish or "abort"
        model.finished[reason] = model.finished.get(reason, 0) + 1
        output, prompt = len(choice.tokens), len(choice.request.prompt)
        model.generation_tokens += output
        model.prompt_tokens += prompt
        seen = model.histograms
        seen["request_prompt_tokens"].observe(prompt)
        seen["request_generation_tokens"].observe(output)
        seen["request_params_max_tokens"].observe(choice.request.sampling.max_tokens)
        if choice.index == 0:
            seen["request_params_n"].observe(len(answer.choices))
        ttft, tpot, e2e = _latencies(choice, answer.received)
        for name, value in (
            ("time_to_first_token_seconds", ttft),
            ("request_time_per_output_token_seconds", tpot),
            ("inter_token_latency_seconds", tpot),
            ("e2e_request_latency_seconds", e2e),
        ):
            if value is not None:
                seen[name].observe(value)
        _phases(seen, choice.stamps)
        if choice.request.slo and not answer.gone:
            met = choice.finish is not None and choice.request.slo.met(ttft, tpot, e2e)
            model.slo.append(met)
            model.slo_met += met
            model.slo_missed += not met

    def retain(self, models: Collection[str]) -> None:
        """Drop the series of models that are served no more."""
        for key in [k for k in self._models if k[0] not in models]:
            del self._models[key]

    def rejected(self, reason: str) -> None:
        self._rejected[reason] = self._rejected.get(reason, 0) + 1

    def response(self, status: int) -> None:
        self._responses[status] = self._responses.get(status, 0) + 1

    def lost(self) -> None:
        self._lost += 1

    # ------------------------------------------------------------ at a scrape

    def collect(self) -> Iterator[Metric]:
        yield from self._histograms()
        yield from self._counters()
        yield from self._gauges()

    def _histograms(self) -> Iterator[Metric]:
        for name, (help, _) in HISTOGRAMS.items():
            family = HistogramMetricFamily(f"collm_{name}", help, labels=["model_name", "engine"])
            for key, model in self._models.items():
                histogram = model.histograms[name]
                family.add_metric(key, histogram.buckets(), histogram.total)
            yield family

    def _counters(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        prompt = CounterMetricFamily("collm_prompt_tokens", "Prompt tokens", labels=labels)
        output = CounterMetricFamily("collm_generation_tokens", "Output tokens", labels=labels)
        success = CounterMetricFamily(
            "collm_request_success", "Ended requests", labels=[*labels, "finished_reason"]
        )
        slo = CounterMetricFamily(
            "collm_slo_requests", "Ended requests that named a SLO", labels=[*labels, "met"]
        )
        for key, model in self._models.items():
            prompt.add_metric(key, model.prompt_tokens)
            output.add_metric(key, model.generation_tokens)
            for reason, count in model.finished.items():
                success.add_metric((*key, reason), count)
            slo.add_metric((*key, "true"), model.slo_met)
            slo.add_metric((*key, "false"), model.slo_missed)
        yield from (prompt, output, success, slo)
        rejected = CounterMetricFamily(
            "collm_admission_rejections", "Refused requests", labels=["reason"]
        )
        for reason, count in self._rejected.items():
            rejected.add_metric([reason], count)
        yield rejected
        responses = CounterMetricFamily("collm_http_responses", "Answers", labels=["status"])
        for status, count in self._responses.items():
            responses.add_metric([str(status)], count)
        yield responses
        yield CounterMetricFamily(
            "collm_requests_lost", "Requests whose replica died under them", value=self._lost
        )

    def _gauges(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        running = GaugeMetricFamily("collm_num_requests_running", "Being answered", labels=labels)
        waiting = GaugeMetricFamily(
            "collm_num_requests_waiting", "Without a first token", labels=labels
        )
        for key, (answering, queued) in self.in_flight().items():
            running.add_metric(key, answering)
            waiting.add_metric(key, queued)
        yield from (running, waiting)
        attained = GaugeMetricFamily(
            "collm_slo_attainment", f"Share of the last {SLO_WINDOW} in time", labels=labels
        )
        for key, model in self._models.items():
            if model.slo:
                attained.add_metric(key, sum(model.slo) / len(model.slo))
        yield attained
        length = GaugeMetricFamily("collm_stream_length", "Entries", labels=["stream"])
        for stream, entries in self.streams.items():
            length.add_metric([stream], entries)
        yield length


def _latencies(choice: Choice, received: float) -> tuple[float | None, float | None, float | None]:
    """TTFT, TPOT, end to end as this gateway saw them, seconds."""
    first, last, output = choice.first_at, choice.finished_at, len(choice.tokens)
    ttft = None if first is None else first - received
    e2e = None if last is None else last - received
    tpot = None
    if first is not None and last is not None and output > 1:
        tpot = (last - first) / (output - 1)
    return ttft, tpot, e2e


def _phases(seen: dict[str, Histogram], stamps: dict[str, float]) -> None:
    """Where the time went, from the replica's stamps (an answer cut here has none)."""
    for name, start, end in (
        ("request_queue_time_seconds", Stamp.RECEIVED, Stamp.STARTED),
        ("request_prefill_time_seconds", Stamp.STARTED, Stamp.FIRST_TOKEN),
        ("request_decode_time_seconds", Stamp.FIRST_TOKEN, Stamp.FINISHED),
        ("request_inference_time_seconds", Stamp.STARTED, Stamp.FINISHED),
    ):
        if start in stamps and end in stamps:
            seen[name].observe(max(0.0, stamps[end] - stamps[start]))
