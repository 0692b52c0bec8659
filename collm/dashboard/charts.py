"""Options of Apache ECharts for each chart, as plain data. Colours suit light and dark pages."""

from __future__ import annotations

from typing import Any

from collm.dashboard.views import CURVES, AdapterRow, Lane, Levels, Point, Rates, SessionView

Options = dict[str, Any]

FONT = "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif"
INK, FAINT = "#8b93a1", "rgba(139,147,161,0.22)"
BLUE, GREEN, AMBER, GREY = "#3b82c4", "#2f9e63", "#d9902f", "#8b93a1"
PALETTE = [BLUE, AMBER, GREEN, "#8e5bd0", "#d0433b", "#1ba3a3", "#b5628f", "#7a8b2f"]
BARS = 40  # replicas in the bar chart at most
STATES = {
    "serving": "#2f9e63",
    "combined": "#8e5bd0",
    "idle": "#3b82c4",
    "starting": "#d9b02f",
    "draining": "#d9902f",
    "dead": "#d0433b",
    "stopped": "#8b93a1",
}


def throughput(rates: Rates, start: float, end: float) -> Options:
    """Tokens and answers per second, as the replicas report them."""
    return _timed(
        start,
        end,
        [_axis("tokens / s"), _axis("answers / s", right=True)],
        [
            _line("tokens / s", rates.tokens, BLUE, area=True),
            _line("answers / s", rates.finished, AMBER, axis=1),
        ],
    )


def goodput(rates: Rates, start: float, end: float) -> Options:
    """Requests in time per second and their share, as the gateways count them."""
    percent = [(t, None if v is None else 100 * v) for t, v in rates.attainment]
    return _timed(
        start,
        end,
        [_axis("requests / s"), {**_axis("%", right=True, top=100), "interval": 25}],
        [
            _line("ended / s", rates.ended, GREY),
            _line("in time / s", rates.goodput, GREEN, area=True),
            _line("attainment %", percent, BLUE, axis=1),
        ],
    )


def queue(levels: Levels, start: float, end: float) -> Options:
    """Requests that wait for a release, and those on replicas."""
    return _timed(
        start,
        end,
        [_axis("requests")],
        [
            _line("waiting", levels.queued, AMBER, area=True),
            _line("in flight", levels.in_flight, BLUE),
        ],
    )


def batch(levels: Levels, start: float, end: float) -> Options:
    """The mean batch of an engine step against the mean ideal b*."""
    ideal = _line("ideal b*", levels.ideal, GREEN)
    ideal["lineStyle"] = {"width": 2, "type": "dashed"}
    return _timed(
        start, end, [_axis("requests")], [_line("batch b", levels.batch, BLUE, area=True), ideal]
    )


def batches(lanes: list[Lane]) -> Options:
    """Each replica's batch of the last seconds, with b* and the limit in force as marks."""
    shown = lanes[:BARS]

    def marks(name: str, values: list[int], colour: str, symbol: str) -> Options:
        return {
            "name": name,
            "type": "scatter",
            "symbol": symbol,
            "symbolSize": [22, 4] if symbol == "rect" else 9,
            "itemStyle": {"color": colour},
            "data": [v or None for v in values],
        }

    options = _base()
    options["xAxis"] = {
        "type": "category",
        "data": [lane.replica for lane in shown],
        "axisLabel": {"color": INK, "hideOverlap": True},
        "axisLine": {"lineStyle": {"color": FAINT}},
    }
    options["yAxis"] = [_axis("requests")]
    options["series"] = [
        {
            "name": "batch b",
            "type": "bar",
            "barMaxWidth": 28,
            "itemStyle": {"color": BLUE, "borderRadius": [3, 3, 0, 0]},
            "data": [round(lane.b, 2) for lane in shown],
        },
        marks("ideal b*", [lane.ideal for lane in shown], GREEN, "rect"),
        marks("limit in force", [lane.limit for lane in shown], AMBER, "triangle"),
    ]
    return options


def quality(rows: list[AdapterRow]) -> Options:
    """Q of each version by round; hollow marks are versions that were not promoted."""
    options = _base()
    options["xAxis"] = {
        "type": "value",
        "name": "round",
        "nameTextStyle": {"color": INK},
        "nameLocation": "middle",
        "nameGap": 24,
        "minInterval": 1,
        "axisLabel": {"color": INK},
        "splitLine": {"show": False},
    }
    options["yAxis"] = [{**_axis("Q"), "min": None, "scale": True}]
    options["grid"]["bottom"] = 38
    options["tooltip"] = {"trigger": "item"}
    options["series"] = []
    for row, colour in zip(rows[:CURVES], PALETTE, strict=False):
        data = [
            {
                "value": [round_, round(q, 4)],
                "itemStyle": {} if promoted else {"color": "transparent", "borderColor": colour},
                "name": f"{row.name} {version}",
            }
            for round_, q, promoted, version in row.versions
        ]
        options["series"].append(
            {
                "name": row.name,
                "type": "line",
                "symbol": "circle",
                "symbolSize": 8,
                "color": colour,
                "itemStyle": {"borderWidth": 2},
                "data": data,
            }
        )
    return options


def losses(view: SessionView) -> Options:
    """Local loss by optimiser step of each client, F and held-out loss of each round."""
    points = [p for curve in (*view.steps.values(), view.loss, view.heldout) for p in curve]
    start = min((t for t, _ in points), default=0.0)
    end = max((t for t, _ in points), default=1.0)
    series = [
        {**_line(client, curve, colour), "lineStyle": {"width": 1, "opacity": 0.8}}
        for (client, curve), colour in zip(view.steps.items(), PALETTE, strict=False)
    ]
    for name, curve, colour, symbol in (
        ("round F", view.loss, INK, "diamond"),
        ("held-out", view.heldout, "#d0433b", "circle"),
    ):
        line = _line(name, curve, colour)
        line.update(showSymbol=True, symbol=symbol, symbolSize=9, lineStyle={"width": 2})
        series.append(line)
    axis = {**_axis("nats / token"), "min": None, "scale": True}
    return _timed(start, max(end, start + 10), [axis], series)


# ---------------------------------------------------------------- parts


def _base() -> Options:
    return {
        "animation": False,
        "useUTC": True,
        "textStyle": {"fontFamily": FONT, "color": INK},
        "grid": {"left": 8, "right": 12, "top": 52, "bottom": 8, "containLabel": True},
        "legend": {
            "type": "scroll",
            "top": 0,
            "left": 0,
            "icon": "roundRect",
            "itemWidth": 14,
            "itemHeight": 8,
            "textStyle": {"color": INK},
            "pageIconColor": INK,
            "pageTextStyle": {"color": INK},
        },
        "tooltip": {"trigger": "axis", "confine": True},
    }


def _timed(start: float, end: float, axes: list[Options], series: list[Options]) -> Options:
    options = _base()
    options["xAxis"] = {
        "type": "time",
        "min": round(start * 1e3),
        "max": round(end * 1e3),
        "splitNumber": 4,
        "axisLabel": {"color": INK, "hideOverlap": True},
        "axisLine": {"lineStyle": {"color": FAINT}},
        "splitLine": {"show": False},
    }
    options["yAxis"] = axes
    options["series"] = series
    return options


def _axis(name: str, *, right: bool = False, top: float | None = None) -> Options:
    return {
        "type": "value",
        "name": name,
        "nameTextStyle": {"color": INK, "align": "right" if right else "left"},
        "min": 0,
        "max": top,
        "splitNumber": 4,
        "axisLabel": {"color": INK},
        "splitLine": {"show": not right, "lineStyle": {"color": FAINT}},
    }


def _line(
    name: str, points: list[Point], colour: str, *, axis: int = 0, area: bool = False
) -> Options:
    line: Options = {
        "name": name,
        "type": "line",
        "showSymbol": False,
        "yAxisIndex": axis,
        "color": colour,
        "lineStyle": {"width": 2},
        "data": [[round(t * 1e3), None if v is None else round(v, 4)] for t, v in points],
    }
    if area:
        line["areaStyle"] = {"opacity": 0.14}
    return line
