"""Results of a simulation: JSON, and one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    "pre{background:#f6f6f6;padding:1rem;overflow:auto;font-size:13px}"
)
NUMBERS = (
    ("requests offered", "offered"),
    ("completed", "completed"),
    ("failed", "failed"),
    ("shed", "shed"),
    ("SLO attainment", "slo_attainment"),
    ("requests/s", "request_throughput"),
    ("good requests/s", "request_goodput"),
    ("output tokens/s", "output_throughput"),
    ("goodput, tokens/s", "goodput_tokens_per_s"),
    ("Q-goodput", "q_goodput"),
    ("TTFT p50, ms", "p50_ttft_ms"),
    ("TTFT p99, ms", "p99_ttft_ms"),
    ("TPOT p99, ms", "p99_tpot_ms"),
    ("E2EL p50, ms", "p50_e2el_ms"),
    ("E2EL p99, ms", "p99_e2el_ms"),
)


class NoPlots(RuntimeError):
    """matplotlib is not installed."""


def save(result: Mapping[str, Any], folder: Path) -> Path:
    """``result.json``, ``scenario.json`` and ``report.html`` in ``folder``; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    scenario = orjson.dumps(result["scenario"], option=orjson.OPT_INDENT_2)
    (folder / "scenario.json").write_bytes(scenario)
    page = folder / "report.html"
    page.write_text(render(result), encoding="utf-8")
    return page


def render(result: Mapping[str, Any]) -> str:
    """The page. Raises NoPlots."""
    title = f"{result['policy']} on {result['replicas']} x {result['profile']} (simulated)"
    columns = {"all": result, **result["tags"]}
    head = "".join(f"<th>{html.escape(str(c) or 'untagged')}</th>" for c in columns)
    rows = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td>{_cell(c.get(key))}</td>' for c in columns.values())}"
        "</tr>"
        for name, key in NUMBERS
    )
    plots = "".join(
        f'<h2>{html.escape(name)}</h2><img alt="{html.escape(name)}" src="{_embedded(figure)}">'
        for name, figure in _figures(result).items()
    )
    scenario = html.escape(orjson.dumps(result["scenario"], option=orjson.OPT_INDENT_2).decode())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>"
        "<p>Virtual time: nothing here was measured on the named hardware.</p>"
        f"<table><tr><th></th>{head}</tr>{rows}</table>{plots}"
        f"<h2>Scenario</h2><pre>{scenario}</pre></html>\n"
    )


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _figures(result: Mapping[str, Any]) -> dict[str, Figure]:
    """Title -> matplotlib figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise NoPlots("plots need matplotlib: pip install 'collm[dev]', or give --no-html") from e
    series = result["by_time"]
    width = series["bucket_seconds"]
    found = {"Load and goodput": Figure(figsize=(9, 3), layout="constrained")}
    axes = found["Load and goodput"].subplots()
    for row, label in (("offered", "offered"), ("good", "answered in time"), ("shed", "refused")):
        values = series.get(row, [])
        if values:
            hours = [k * width / 3600 for k in range(len(values))]
            axes.plot(hours, [v / width for v in values], label=label, linewidth=1)
    axes.set(xlabel="hours", ylabel="requests/s")
    axes.legend()
    for title, key in (("Utilisation of serving", "utilisation"), ("Training", "training")):
        if any(map(any, series[key])):
            found[title] = _heat(series[key], series["utilisation_bucket_seconds"])
    if "training" in result:
        figure = found["Cross-entropy on references"] = Figure((9, 3), layout="constrained")
        axes = figure.subplots()
        times, losses = zip(*result["training"]["cross_entropy"], strict=True)
        axes.step([t / 3600 for t in times], losses, where="post")
        axes.set(xlabel="hours", ylabel="nats/token")
    return found


def _heat(rows: list[list[float]], width: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    longest = max(map(len, rows))
    image = [row + [0.0] * (longest - len(row)) for row in rows]
    extent = (0, longest * width / 3600, len(rows), 0)
    shown = axes.imshow(image, aspect="auto", vmin=0, vmax=1, extent=extent, cmap="viridis")
    axes.set(xlabel="hours", ylabel="replica")
    figure.colorbar(shown, ax=axes)
    return figure


def _embedded(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
