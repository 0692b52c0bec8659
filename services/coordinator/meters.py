"""Prometheus series of the coordinator."""

from __future__ import annotations

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.messages import TrainSample

# quorum: too few handed over in time; aggregation: no server made a version of what they did.
RoundFailure = Literal["quorum", "aggregation"]


class Meters:
    """One registry a process; series of an ended session disappear with ``forget``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        one = self.registry
        self.round = Gauge("collm_fl_round", "Round in work", ["adapter"], registry=one)
        self.participants = Gauge("collm_fl_participants", "Clients", ["adapter"], registry=one)
        self.failures = Counter(
            "collm_fl_round_failures", "Rounds without a version", ["reason"], registry=one
        )
        for reason in get_args(RoundFailure):  # a series that is there from the start can rise
            self.failures.labels(reason)
        self.error = Gauge(
            "collm_fl_aggregation_error",
            "Relative error of averaging the factors apart",
            ["adapter"],
            registry=one,
        )
        self.loss = Gauge("collm_fl_loss", "Training loss of the round", ["adapter"], registry=one)
        self.heldout = Gauge(
            "collm_fl_heldout_ce", "Held-out nats per token", ["adapter"], registry=one
        )
        self.quality = Gauge(
            "collm_fl_quality", "Q of the current version", ["adapter"], registry=one
        )
        self.epsilon = Gauge(
            "collm_fl_epsilon", "Privacy spent by a client so far", ["adapter"], registry=one
        )
        self.exchange_bytes = Counter(
            "collm_fl_exchange_bytes", "Adapter bytes moved", ["path"], registry=one
        )
        self.exchange_seconds = Counter(
            "collm_fl_exchange_seconds", "Seconds spent moving them", ["path"], registry=one
        )
        self.overhead = Histogram(
            "collm_fl_round_overhead",
            "Share of a round that is not training",
            buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
            registry=one,
        )
        self.goodput = Gauge(
            "collm_goodput_estimate", "Training goodput at B*", ["replica"], registry=one
        )
        self.r2 = Gauge(
            "collm_latency_model_r2", "R2 of the decode fit", ["replica", "variables"], registry=one
        )
        self.fit_error = Gauge(
            "collm_latency_model_error",
            "Mean of |measured - fitted| / measured, decode steps",
            ["replica"],
            registry=one,
        )
        self.train_tokens = Counter(
            "collm_train_tokens", "Tokens trained on", ["replica", "adapter"], registry=one
        )
        self.train_step = Histogram(
            "collm_train_step_seconds",
            "Mean micro-step of an optimiser step, waits excluded",
            ["replica"],
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
            registry=one,
        )

    def trained(self, sample: TrainSample) -> None:
        """An optimiser step of some replica."""
        self.train_tokens.labels(sample.replica, sample.adapter).inc(sample.tokens)
        if sample.micro_seconds > 0:
            self.train_step.labels(sample.replica).observe(sample.micro_seconds)

    def forget_replica(self, replica: str) -> None:
        """A replica is gone."""
        for metric in (
            *(self.goodput, self.r2, self.fit_error),
            *(self.train_tokens, self.train_step),
        ):
            metric.remove_by_labels({"replica": replica})

    def forget(self, adapter: str) -> None:
        """An adapter's session ended."""
        for gauge in (self.round, self.participants):
            gauge.remove(adapter)
