"""Writes the Grafana dashboards in ``deploy/grafana/dashboards``: ``python -m tools.dashboards``.

A dashboard is a list of panels; a panel is a title, a unit and its queries. A test checks that
the files are current and that every metric they name exists in the code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT = 12, 8


@dataclass(frozen=True)
class Panel:
    """Queries as (legend, PromQL). ``kind`` is a Grafana panel type."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


def _quantiles(metric: str, job: str = "gateway") -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            f"p{q}",
            f"histogram_quantile({q / 100}, sum by (le) "
            f'(rate({metric}_bucket{{job="{job}"}}[$__rate_interval])))',
        )
        for q in (50, 90, 99)
    )


def _rate(metric: str, by: str, job: str) -> str:
    return f'sum by ({by}) (rate({metric}{{job="{job}"}}[$__rate_interval]))'


SERVING = (
    Panel("SLO attainment", "percentunit", (("{{model_name}}", "collm_slo_attainment"),)),
    Panel(
        "Output tokens/s",
        "short",
        (("{{model_name}}", _rate("collm_generation_tokens_total", "model_name", "gateway")),),
    ),
    Panel("Time to first token", "s", _quantiles("collm_time_to_first_token_seconds")),
    Panel("Time per output token", "s", _quantiles("collm_request_time_per_output_token_seconds")),
    Panel("End to end", "s", _quantiles("collm_e2e_request_latency_seconds")),
    Panel("Waiting before prefill", "s", _quantiles("collm_request_queue_time_seconds")),
    Panel(
        "Requests finished",
        "reqps",
        (
            (
                "{{finished_reason}}",
                _rate("collm_request_success_total", "finished_reason", "gateway"),
            ),
        ),
    ),
    Panel(
        "Requests refused",
        "reqps",
        (("{{reason}}", _rate("collm_admission_rejections_total", "reason", "gateway")),),
    ),
)
REPLICAS = (
    Panel(
        "State of replicas",
        "short",
        (("{{replica}} {{mode}}", "collm_replica_mode == 1"),),
        "state-timeline",
    ),
    Panel(
        "Requests running",
        "short",
        (("{{engine}}", 'collm_num_requests_running{job="replica"}'),),
    ),
    Panel(
        "Requests without KV memory",
        "short",
        (("{{engine}}", 'collm_num_requests_waiting{job="replica"}'),),
    ),
    Panel(
        "KV memory used",
        "percentunit",
        (("{{engine}}", 'collm_kv_cache_usage_perc{job="replica"}'),),
    ),
    Panel(
        "Utilisation by serving",
        "percentunit",
        (("{{replica}} ({{source}})", "collm_replica_utilisation"),),
    ),
    Panel(
        "Prompt tokens found in the prefix cache",
        "percentunit",
        (
            (
                "{{engine}}",
                _rate("collm_prefix_cache_hits_total", "engine", "replica")
                + " / "
                + _rate("collm_prefix_cache_queries_total", "engine", "replica"),
            ),
        ),
    ),
    Panel("Engine step", "s", _quantiles("collm_step_seconds", "replica")),
    Panel(
        "Tokens/s of each replica",
        "short",
        (("{{engine}}", _rate("collm_generation_tokens_total", "engine", "replica")),),
    ),
    Panel(
        "Adapters loaded",
        "short",
        (("{{replica}} {{adapter}} {{version}}", "collm_lora_adapter_loaded"),),
        "table",
    ),
)
FEDERATED = (
    Panel("Round", "short", (("{{adapter}}", "collm_fl_round"),)),
    Panel("Participants", "short", (("{{adapter}}", "collm_fl_participants"),)),
    Panel("Training loss", "short", (("{{adapter}}", "collm_fl_loss"),)),
    Panel("Held-out cross-entropy (nats)", "short", (("{{adapter}}", "collm_fl_heldout_ce"),)),
    Panel("Quality Q", "short", (("{{adapter}}", "collm_fl_quality"),)),
    Panel(
        "Failed rounds",
        "short",
        (
            (
                "{{reason}}",
                "sum by (reason) (increase(collm_fl_round_failures_total[$__rate_interval]))",
            ),
        ),
    ),
    Panel(
        "Tokens trained on, per second",
        "short",
        (("{{replica}}", _rate("collm_train_tokens_total", "replica", "coordinator")),),
    ),
    Panel("Training micro-step", "s", _quantiles("collm_train_step_seconds", "coordinator")),
    Panel("Estimated goodput", "short", (("{{replica}}", "collm_goodput_estimate"),)),
    Panel(
        "Fit of the latency model (R²)",
        "short",
        (("{{replica}}", 'collm_latency_model_r2{variables="two"}'),),
    ),
    Panel(
        "Error of the latency model",
        "percentunit",
        (("{{replica}}", "collm_latency_model_error"),),
    ),
)
DISPATCHER = (
    Panel("Queued", "short", (("{{model_name}}", "collm_dispatcher_queued"),)),
    Panel("In flight", "short", (("{{model_name}}", "collm_dispatcher_in_flight"),)),
    Panel("Wait before release", "s", _quantiles("collm_dispatcher_wait_seconds", "dispatcher")),
    Panel(
        "Duration of a decision", "s", _quantiles("collm_dispatcher_decision_seconds", "dispatcher")
    ),
    Panel(
        "Requests per batch",
        "short",
        (
            (
                "{{model_name}}",
                _rate("collm_dispatcher_released_total", "model_name", "dispatcher")
                + " / "
                + _rate("collm_dispatcher_batches_total", "model_name", "dispatcher"),
            ),
        ),
    ),
    Panel(
        "Given back after a death",
        "short",
        (("lost", "sum(increase(collm_dispatcher_lost_total[$__rate_interval]))"),),
    ),
    Panel(
        "Requests refused",
        "reqps",
        (("{{reason}}", _rate("collm_requests_shed_total", "reason", "dispatcher")),),
    ),
    Panel("Active dispatchers", "short", (("active", "sum(collm_dispatcher_active)"),)),
)
REDIS = (
    Panel(
        "Memory",
        "bytes",
        (("in use", "collm_redis_memory_bytes"), ("limit", "collm_redis_memory_limit_bytes > 0")),
    ),
    Panel(
        "Entries in streams", "short", (("{{stream}}", "max by (stream) (collm_stream_length)"),)
    ),
    Panel("Entries not acknowledged", "short", (("{{stream}}", "collm_stream_pending"),)),
    Panel("Commands per second", "short", (("commands", "collm_redis_commands_per_second"),)),
    Panel("Round trip", "s", (("round trip", "collm_redis_round_trip_seconds"),)),
    Panel(
        "Connections",
        "short",
        (("all", "collm_redis_clients"), ("waiting", "collm_redis_blocked_clients")),
    ),
    Panel("Persistence", "short", (("well", "collm_redis_persistence_ok"),)),
    Panel("Keys evicted", "short", (("evicted", "collm_redis_evicted_keys"),)),
)
DASHBOARDS = {
    "serving": ("Serving and SLO", SERVING),
    "replicas": ("Replicas", REPLICAS),
    "federated": ("Federated sessions", FEDERATED),
    "dispatcher": ("Dispatcher", DISPATCHER),
    "redis": ("Redis", REDIS),
}


def dashboard(uid: str) -> dict[str, Any]:
    """One dashboard as Grafana's JSON model."""
    title, panels = DASHBOARDS[uid]
    return {
        "uid": f"collm-{uid}",
        "title": f"CoLLM: {title}",
        "tags": ["collm"],
        "schemaVersion": 39,
        "version": 1,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "editable": True,
        "links": [{"type": "dashboards", "tags": ["collm"], "title": "CoLLM", "asDropdown": False}],
        "panels": [_panel(i, panel) for i, panel in enumerate(panels)],
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": index + 1,
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {
            "x": index % 2 * WIDTH,
            "y": index // 2 * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "format": "table" if panel.kind == "table" else "time_series",
                "instant": panel.kind == "table",
            }
            for i, (legend, expression) in enumerate(panel.queries)
        ],
    }


def text(uid: str) -> str:
    return json.dumps(dashboard(uid), indent=1) + "\n"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for uid in DASHBOARDS:
        (FOLDER / f"{uid}.json").write_text(text(uid), encoding="utf-8")


if __name__ == "__main__":
    main()
