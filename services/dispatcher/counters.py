"""Prometheus metrics of the dispatcher."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.dispatcher.redis_meter import RedisMeter

_WAITS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ADDED = (2.5e-4, 5e-4, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 7.5e-3, 1e-2, 2e-2, 5e-2, 0.1, 1.0)
_DECISIONS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)


class Counters:
    """One object a process; label is the base model."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        model = ["model_name"]
        self.received = Counter(
            "collm_dispatcher_requests", "Requests read", model, registry=registry
        )
        self.released = Counter(
            "collm_dispatcher_released", "Requests released", model, registry=registry
        )
        self.batches = Counter(
            "collm_dispatcher_batches", "Batches released", model, registry=registry
        )
        self.refused = Counter(
            "collm_requests_shed", "Requests refused", [*model, "reason"], registry=registry
        )
        self.cancelled = Counter(
            "collm_dispatcher_cancelled", "Queued requests dropped", model, registry=registry
        )
        self.lost = Counter(
            "collm_dispatcher_lost", "Requests lost with a replica", registry=registry
        )
        self.reconciled = Counter(
            "collm_dispatcher_reconciled",
            "Completions found by comparing with a replica's stream",
            registry=registry,
        )
        self.recovered = Counter(
            "collm_dispatcher_recovered", "Requests claimed from another", registry=registry
        )
        self.queued = Gauge("collm_dispatcher_queued", "Requests waiting", model, registry=registry)
        self.in_flight = Gauge(
            "collm_dispatcher_in_flight", "Requests on replicas", model, registry=registry
        )
        self.wait = Histogram(
            "collm_dispatcher_wait_seconds",
            "Read to released",
            model,
            buckets=_WAITS,
            registry=registry,
        )
        self.hold = Histogram(
            "collm_dispatcher_hold_seconds",
            "Held back on purpose: waited for the policy although a replica had a free place",
            model,
            buckets=_WAITS,
            registry=registry,
        )
        self.added = Histogram(
            "collm_dispatcher_added_seconds",
            "Read to released less what it waited for the policy: the dispatcher's own latency",
            model,
            buckets=_ADDED,
            registry=registry,
        )
        self.decision = Histogram(
            "collm_dispatcher_decision_seconds",
            "Time of one call of the policy",
            buckets=_DECISIONS,
            registry=registry,
        )
        self.active = Gauge(
            "collm_dispatcher_active", "1 while this process holds the lease", registry=registry
        )
        self.redis = RedisMeter(registry)

    def stand_by(self) -> None:
        """This process does not act (any more): what it saw last is no news of today."""
        self.active.set(0)
        for gauge in (self.queued, self.in_flight):
            gauge.clear()
        self.redis.clear()
