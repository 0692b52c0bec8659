"""Writes docs/metrics.md from the collectors of every service: ``python -m tools.metrics``.

A test checks that the file is current.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from services.coordinator.meters import Meters as Coordinator
from services.dispatcher.counters import Counters
from services.gateway.metrics import Metrics
from services.launcher.service import Meters as Launcher
from services.replica.meters import Meters as Replica

TARGET = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
INTRODUCTION = """# Metrics

Every process serves `/metrics` in Prometheus's text format. Names are vLLM's with the prefix
`collm_`; a dashboard made for vLLM needs one search-and-replace and `job="gateway"` in its queries,
because gateway and replicas export latencies and token counts under the same names: a sum over both
counts everything twice. Latencies are seconds. A series disappears with the replica, adapter or
model that it describes. The label `engine` is the kind of engine on the gateway, the replica's id
on replicas; `collm_engine_info` there says what computes.
One name differs: vLLM's histogram `iteration_tokens_total` is `collm_iteration_tokens`, because
only counters may end in `_total`. What only an acting process knows (dispatcher, launcher,
coordinator hold leases) is absent on those that stand by.

Alert rules are in `deploy/prometheus/rules.yml`, dashboards in `deploy/grafana/dashboards/`.

This page is written from the code by `python -m tools.metrics`.
"""


def registries() -> Iterator[tuple[str, CollectorRegistry]]:
    yield "gateway", Metrics().registry
    yield "dispatcher", Counters().registry
    yield "launcher", Launcher().registry
    yield "coordinator", Coordinator().registry
    yield "replica", Replica("model", "torch").registry


def text() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for service, registry in registries():
        parts += [f"## {service}", "", "| name | type | labels | what it is |", "|---|---|---|---|"]
        rows = {
            f"| `{family.name}{'_total' if family.type == 'counter' else ''}` | {family.type} "
            f"| {', '.join(f'`{label}`' for label in labels)} "
            f"| {family.documentation.replace('|', chr(92) + '|')} |"
            for family, labels in families(registry)
        }
        parts += [*sorted(rows), ""]
    return "\n".join(parts)


def families(registry: CollectorRegistry) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Every family with its labels (without a bucket's ``le``). The package has no public way to
    ask for the labels of one that holds no series yet."""
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            yield family, getattr(family, "_labelnames", getattr(collector, "_labelnames", ()))


def main() -> None:
    TARGET.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
