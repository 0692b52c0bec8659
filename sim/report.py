"""Results of a simulation: JSON, and one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
import importlib.util
import io
from collections.abc import Iterable, Mapping
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
UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
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


WORDS = (
    "<p>Good requests and goodput are a second until the last arrival or answer in time, all other "
    "rates until the last answer: where late answers take long, goodput is above the output.</p>"
)

WHAT_IF_NUMBERS = (
    ("largest load, times the given one", "largest_scale"),
    ("requests answered there, a second until the last answer", "requests_per_s"),
    ("goodput there, tokens/s", "goodput_tokens_per_s"),
    ("SLO attainment there", "slo_attainment"),
    ("SLO attainment unloaded", "unloaded_attainment"),
    ("attainment to keep, of the unloaded one", "target"),
    ("utilisation there", "utilisation"),
)
WHAT_IF_TRAINING = (
    ("training, samples/s", "training_samples_per_s"),
    ("training, share of the replicas' time", "training_compute_share"),
    ("SLO attainment beside it", "slo_attainment_while_training"),
)


class NoPlots(RuntimeError):
    """matplotlib is not installed."""


def need_plots() -> None:
    """To be asked before a long run whose page has plots. Raises NoPlots."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NoPlots(
            "the page of --out has plots, and matplotlib is not installed: "
            "`pip install matplotlib`, or leave out --out (the result is printed all the same)"
        )


def save_what_if(found: Mapping[str, Any], folder: Path) -> Path:
    """``what_if.json`` and ``report.html`` in ``folder``; returns the page. Needs no matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "what_if.json").write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    page = folder / "report.html"
    page.write_text(render_what_if(found), encoding="utf-8")
    return page


def render_what_if(found: Mapping[str, Any]) -> str:
    """The page of a what-if: what the cluster carries, what it trains, which loads were tried."""
    numbers = ((name, found[key]) for name, key in WHAT_IF_NUMBERS)
    training = (
        (name, found[key]["at_scale_1"], found[key]["at_largest_scale"])
        for name, key in WHAT_IF_TRAINING
    )
    needed = found["target"] * found["unloaded_attainment"]
    tried = (
        (scale, attained, "yes" if attained >= needed else "no")
        for scale, attained in found["tried"].items()
    )
    body = (
        _table(("", ""), numbers)
        + "<h2>Beside training</h2>"
        + _table(("", "at scale 1", "at the largest"), training)
        + "<h2>Loads tried</h2>"
        + _table(("scale", "SLO attainment", "kept"), tried)
        + f"<p>It took {found['took_s']:.1f} s.</p>"
    )
    title = f"What {found['policy']} on {found['replicas']} x {found['profile']} carries"
    return _page(f"{title} (simulated)", body, found["scenario"])


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
    tags = {} if list(result["tags"]) == [""] else result["tags"]  # else all twice
    columns = {"all": result, **tags}
    head = ["", *(tag or "untagged" for tag in columns)]
    rows = ((name, *(column.get(key) for column in columns.values())) for name, key in NUMBERS)
    plots = "".join(
        f'<h2>{html.escape(name)}</h2><img alt="{html.escape(name)}" src="{_embedded(figure)}">'
        for name, figure in _figures(result).items()
    )
    return _page(title, _table(head, rows) + WORDS + plots, result["scenario"])


def _page(title: str, body: str, scenario: Mapping[str, Any]) -> str:
    told = html.escape(orjson.dumps(scenario, option=orjson.OPT_INDENT_2).decode())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>"
        "<p>Virtual time: nothing here was measured on the named hardware.</p>"
        f"{body}<h2>Scenario</h2><pre>{told}</pre></html>\n"
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{_cell(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return html.escape(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.4g}"


def _figures(result: Mapping[str, Any]) -> dict[str, Figure]:
    """Title -> matplotlib figure."""
    need_plots()
    from matplotlib.figure import Figure

    series = result["by_time"]
    width = series["bucket_seconds"]
    unit, length = _unit(result["drained"])
    found = {"Load and goodput": Figure(figsize=(9, 3), layout="constrained")}
    axes = found["Load and goodput"].subplots()
    for row, label in (("offered", "offered"), ("good", "answered in time"), ("shed", "refused")):
        values = series.get(row, [])
        if values:
            times = [k * width / length for k in range(len(values))]
            axes.plot(times, [v / width for v in values], label=label, linewidth=1)
    axes.set(xlabel=unit, ylabel="requests/s")
    axes.legend()
    for title, key in (("Utilisation of serving", "utilisation"), ("Training", "training")):
        if any(map(any, series[key])):
            seconds = series["utilisation_bucket_seconds"] / length
            found[title] = _heat(series[key], seconds, unit)
    if "training" in result:
        figure = found["Cross-entropy on references"] = Figure((9, 3), layout="constrained")
        axes = figure.subplots()
        points = result["training"]["cross_entropy"]
        points = [*points, [max(points[-1][0], result["drained"]), points[-1][1]]]  # to the end
        axes.step([t / length for t, _ in points], [ce for _, ce in points], where="post")
        axes.set(xlabel=unit, ylabel="nats/token")
    return found


def _unit(seconds: float) -> tuple[str, float]:
    """In what a time axis of that length is told, and how many seconds that is."""
    return next(((u, s) for u, s in UNITS if seconds >= 2 * s), UNITS[-1])


def _heat(rows: list[list[float]], width: float, unit: str) -> Figure:
    """``width`` of a bucket, in ``unit``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    longest = max(map(len, rows))
    image = [row + [0.0] * (longest - len(row)) for row in rows]
    extent = (0, longest * width, len(rows), 0)
    shown = axes.imshow(image, aspect="auto", vmin=0, vmax=1, extent=extent, cmap="viridis")
    axes.set(xlabel=unit, ylabel="replica")
    figure.colorbar(shown, ax=axes)
    return figure


def _embedded(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
