"""Prometheus metrics of the inference process: vLLM's names under the prefix ``collm_``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from services.replica.engines.base import EngineStatus, StepReport
from shared.buckets import LATENCY, PER_TOKEN, TOKENS, TTFT
from shared.lifetime import Stamp, tpot
from shared.messages import Finished, Generate, Output

M = TypeVar("M", bound=MetricWrapperBase)

LABELS = ("model_name", "engine")
SLOW_TOKEN = (*PER_TOKEN, 20.0, 40.0, 80.0)


class Meters:
    """Metrics of all replicas of the process; label ``engine`` is the replica's id.

    An emulated engine says so in ``collm_engine_info`` and in the label ``emulated`` there.
    """

    def __init__(self, model: str, engine: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        one: dict[str, Any] = {"labelnames": LABELS, "registry": self.registry}
        self._info = Gauge(
            "collm_engine_info",
            "1; what computes the answers",
            ("model_name", "engine", "kind", "emulated"),
            registry=self.registry,
        )
        self._kind = engine
        self._running = Gauge("collm_num_requests_running", "Requests decoding together", **one)
        self._waiting = Gauge("collm_num_requests_waiting", "Requests without KV memory", **one)
        self._kv = Gauge("collm_kv_cache_usage_perc", "KV memory in use, 0 to 1", **one)
        self._prompt = Counter("collm_prompt_tokens", "Prompt tokens prefilled", **one)
        self._output = Counter("collm_generation_tokens", "Tokens generated", **one)
        self._looked_up = Counter(
            "collm_prefix_cache_queries", "Prompt tokens looked up in the prefix cache", **one
        )
        self._found = Counter("collm_prefix_cache_hits", "Prompt tokens found in it", **one)
        self._preemptions = Counter(
            "collm_num_preemptions", "Sequences that gave their KV memory back", **one
        )
        self._preempted: dict[str, int] = {}  # replica -> told so far
        self._success = Counter(
            "collm_request_success",
            "Requests that left the engine, by reason",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._ttft = Histogram(
            "collm_time_to_first_token_seconds", "Arrival to first token", buckets=TTFT, **one
        )
        self._tpot = Histogram(
            "collm_request_time_per_output_token_seconds",
            "Per token after the first",
            buckets=SLOW_TOKEN,
            **one,
        )
        self._e2e = Histogram(
            "collm_e2e_request_latency_seconds", "Arrival to last token", buckets=LATENCY, **one
        )
        self._queue = Histogram(
            "collm_request_queue_time_seconds",
            "Arrival to start of prefill",
            buckets=LATENCY,
            **one,
        )
        self._prefill = Histogram(
            "collm_request_prefill_time_seconds",
            "Start of prefill to first token",
            buckets=LATENCY,
            **one,
        )
        self._decode = Histogram(
            "collm_request_decode_time_seconds", "First to last token", buckets=LATENCY, **one
        )
        self._prompt_length = Histogram(
            "collm_request_prompt_tokens", "Prompt length", buckets=TOKENS, **one
        )
        self._output_length = Histogram(
            "collm_request_generation_tokens", "Answer length", buckets=TOKENS, **one
        )
        self._iteration = Histogram(
            "collm_iteration_tokens", "Tokens processed in a step", buckets=TOKENS, **one
        )
        self._step = Histogram(
            "collm_step_seconds",
            "Duration of an engine step",
            buckets=SLOW_TOKEN,
            **one,
        )
        self._adapters = Gauge(
            "collm_lora_adapter_loaded",
            "1 for each adapter given to new requests",
            ("adapter", "replica", "version"),
            registry=self.registry,
        )
        self._lag = Gauge(
            "collm_emulated_step_lag_p99", "p99 of step lag over step time; above 0.05: void", **one
        )
        self._loaded: dict[str, dict[str, str]] = {}
        self._series: dict[tuple[int, str], MetricWrapperBase] = {}
        self._spans = (
            (self._ttft, Stamp.RECEIVED, Stamp.FIRST_TOKEN),
            (self._e2e, Stamp.RECEIVED, Stamp.FINISHED),
            (self._queue, Stamp.RECEIVED, Stamp.STARTED),
            (self._prefill, Stamp.STARTED, Stamp.FIRST_TOKEN),
            (self._decode, Stamp.FIRST_TOKEN, Stamp.FINISHED),
        )

    def _of(self, metric: M, replica: str) -> M:
        """The metric's series of one replica; looked up once (labels() is slow)."""
        key = (id(metric), replica)
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = metric.labels(self._model, replica)
        return cast(M, found)

    def stepped(self, replica: str, report: StepReport) -> None:
        """After every engine step."""
        if report.prefill_tokens:
            self._of(self._prompt, replica).inc(report.prefill_tokens)
        if report.outputs:
            tokens = sum([len(output.tokens) for _, output in report.outputs])
            self._of(self._output, replica).inc(tokens)
        if report.b:
            self._of(self._iteration, replica).observe(report.prefill_tokens + report.decode_tokens)
            self._of(self._step, replica).observe(report.seconds)

    def answered(self, replica: str, request: Generate, output: Output) -> None:
        """With the final output of a request, which carries all stamps."""
        stamps = output.stamps
        tokens = output.offset + len(output.tokens)
        for histogram, start, end in self._spans:
            if start in stamps and end in stamps:
                self._of(histogram, replica).observe(stamps[end] - stamps[start])
        per_token = tpot(stamps, tokens - len(request.generated))
        if per_token is not None:
            self._of(self._tpot, replica).observe(per_token)
        self._of(self._prompt_length, replica).observe(len(request.prompt))
        self._of(self._looked_up, replica).inc(len(request.prompt))
        self._of(self._found, replica).inc(output.cached_tokens)
        self._of(self._output_length, replica).observe(tokens)

    def left(self, replica: str, finished: Finished) -> None:
        """A request has left the engine, for whatever reason."""
        reason = "abort" if finished.reason == "cancelled" else finished.reason
        self._success.labels(self._model, replica, reason).inc()

    def state(self, replica: str, status: EngineStatus, lag: float | None) -> None:
        """Gauges, now and then; series of adapters that are gone are removed."""
        labels = (self._model, replica)
        emulated = str(self._kind == "emulated").lower()
        self._info.labels(*labels, self._kind, emulated).set(1)
        self._running.labels(*labels).set(status.running)
        self._waiting.labels(*labels).set(status.waiting)
        self._kv.labels(*labels).set(status.kv_used / max(1, status.kv_total))
        told = self._preempted.get(replica, 0)
        self._preemptions.labels(*labels).inc(max(0, status.preemptions - told))
        self._preempted[replica] = status.preemptions
        if lag is not None:
            self._lag.labels(*labels).set(lag)
        before = self._loaded.get(replica, {})
        for name, version in before.items():
            if status.adapters.get(name) != version:
                self._adapters.remove(name, replica, version)
        for name, version in status.adapters.items():
            self._adapters.labels(name, replica, version).set(1)
        self._loaded[replica] = dict(status.adapters)

    def text(self) -> str:
        """Exposition format."""
        return generate_latest(self.registry).decode()


class ChildMetrics(Collector):
    """The child's metrics as the parent passes them on."""

    def __init__(self) -> None:
        self.text = ""

    def collect(self) -> Iterator[Metric]:
        yield from text_string_to_metric_families(self.text)
