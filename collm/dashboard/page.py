"""The page: NiceGUI elements filled from the views, again every other second."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from nicegui import ui

from collm.dashboard import charts, markup, views
from collm.dashboard.history import History
from shared.clock import Now

REFRESH = 2.0  # seconds
STYLE = Path(__file__).with_name("style.css")
WINDOWS = {300: "5 min", 900: "15 min", 3600: "1 h"}
THEMES: tuple[tuple[bool | None, str, str], ...] = (
    (None, "brightness_auto", "as the system"),
    (True, "dark_mode", "dark"),
    (False, "light_mode", "light"),
)


class Page:
    """One browser tab. ``history`` is shared by all tabs and only read."""

    def __init__(self, history: History, now: Now) -> None:
        self._history, self._now = history, now
        self._window, self._seen = 300, -1
        self._sessions: dict[str, tuple[ui.html, ui.echart]] = {}
        self._parts: list[Callable[[float], None]] = []
        ui.add_css(STYLE)
        self._dark = ui.dark_mode(None)
        self._head()
        with ui.element("div").classes("sheet"):
            self._body()
        ui.timer(REFRESH, self.refresh)
        self.refresh(force=True)

    # ------------------------------------------------------------ building

    def _head(self) -> None:
        with ui.element("header"):
            ui.html("CoLLM", sanitize=False).classes("brand")
            self._model = ui.html("", sanitize=False).classes("hint model")
            self._emulated = ui.html("EMULATED", sanitize=False).classes("emulated")
            ui.element("div").classes("gap")
            names = {k: v for k, v in WINDOWS.items() if k <= self._history.seconds}
            ui.toggle(names, value=self._window, on_change=self._set_window).props(
                "dense no-caps unelevated"
            ).classes("windows")
            self._theme = ui.button(icon=THEMES[0][1], on_click=self._next_theme)
            self._theme.props("flat dense round aria-label='theme'").classes("theme")
        self._away = ui.html("", sanitize=False).classes("banner bad-banner")
        self._note = ui.html("", sanitize=False).classes("banner")

    def _body(self) -> None:
        tiles = ui.html("", sanitize=False).classes("tiles")
        self._parts.append(lambda now: _fill(tiles, markup.tiles(views.tiles(self._history, now))))
        with _card("Replica states", wide=True):
            ui.html(markup.legend(), sanitize=False).classes("legend")
            lanes = ui.html("", sanitize=False).classes("lanes")
            empty = _empty("No replica has registered yet. Start one with `collm up`.")
            self._parts.append(lambda now: self._lanes(lanes, empty, now))
        with ui.element("div").classes("grid"):
            self._curves()
        with _card("Federated rounds", wide=True):
            self._no_session = _empty(
                "No session now or lately. Idle replicas with training data start one: "
                "`collm data add`."
            )
            self._session_box = ui.element("div").classes("grid")
            self._parts.append(self._show_sessions)
        self._events()

    def _curves(self) -> None:
        self._goodput_card()
        self._chart(
            "Throughput",
            "reported by the replicas with each engine step",
            lambda now: charts.throughput(self._rates(now), now - self._window, now),
        )
        self._chart(
            "Queue",
            "requests in Redis that wait for a release; those on replicas",
            lambda now: charts.queue(self._levels(now), now - self._window, now),
        )
        self._chart(
            "Batch size against the ideal",
            "requests in one engine step, mean over busy replicas; b* as the coordinator fits it",
            lambda now: charts.batch(self._levels(now), now - self._window, now),
        )
        self._chart(
            "Batch by replica",
            "last 10 s",
            lambda now: charts.batches(views.lanes(self._history, now, self._window)),
        )
        with _card("Adapters"):
            empty = _empty("No adapter is registered.")
            chart = ui.echart(charts.quality([])).classes("chart")
            rows = ui.html("", sanitize=False).classes("items")
            self._parts.append(lambda now: self._adapters(chart, rows, empty))

    def _goodput_card(self) -> None:
        with _card("Goodput and SLO attainment"):
            ui.label(
                "counted by the gateway: ended requests that named a limit, and those in time"
            ).classes("hint")
            empty = ui.html("", sanitize=False).classes("empty")
            chart = ui.echart({}).classes("chart")

        def show(now: float) -> None:
            why = self._no_goodput()
            _fill(empty, why)
            empty.set_visibility(bool(why))
            chart.set_visibility(not why)
            if not why:
                _draw(chart, charts.goodput(self._rates(now), now - self._window, now))

        self._parts.append(show)

    def _no_goodput(self) -> str:
        known = self._history.gateways
        if not known:
            return (
                "No gateway is known, so whether answers were in time is not known. "
                "Name it: <code>collm dashboard --gateway URL</code>."
            )
        silent = {address: why for address, why in known.items() if why is not None}
        if len(silent) == len(known):
            first, why = next(iter(silent.items()))
            return f"The gateway at {escape(first)} gives no answer ({escape(why)})."
        return ""

    def _chart(self, title: str, source: str, options: Callable[[float], charts.Options]) -> None:
        with _card(title):
            ui.label(source).classes("hint")
            chart = ui.echart(options(self._now())).classes("chart")
        self._parts.append(lambda now: _draw(chart, options(now)))

    def _events(self) -> None:
        with _card("Events", wide=True):
            with ui.element("div").classes("filters"):
                kinds = ui.select([], multiple=True, label="kinds", clearable=True)
                kinds.props("dense outlined use-chips options-dense").classes("kinds")
                text = ui.input("contains").props("dense outlined clearable debounce=300")
                text.classes("text")
            empty = _empty("No event matches.")
            rows = ui.html("", sanitize=False).classes("events")

        def show(now: float) -> None:
            known = views.kinds(self._history)
            if kinds.options != known:
                kinds.set_options(known, value=[k for k in kinds.value or [] if k in known])
            found = views.events(self._history, kinds.value or (), text.value or "")
            empty.set_visibility(not found)
            _fill(rows, markup.events(found))

        kinds.on_value_change(lambda: show(self._now()))
        text.on_value_change(lambda: show(self._now()))
        self._parts.append(show)

    # ------------------------------------------------------------ filling

    def refresh(self, *, force: bool = False) -> None:
        """Show what is known now."""
        history = self._history
        self._status()
        if not force and history.away is not None and history.changes == self._seen:
            return  # time stands still for the curves while Redis is away
        self._seen = history.changes
        now = self._now() if history.away is None else history.snapshot.time
        for part in self._parts:
            part(now)

    def _status(self) -> None:
        history = self._history
        snap = history.snapshot
        models = ", ".join(m.name for m in snap.models) or "no model yet"
        _fill(self._model, escape(f"{models} · {markup.clock(self._now())} UTC"))
        self._emulated.set_visibility(history.any_emulated)
        away = history.away
        since = f" Shown is the state of {markup.clock(snap.time)} UTC." if snap.time else ""
        reason = escape((away or "").rstrip("."))
        _fill(self._away, f"Redis gives no answer: {reason}.{since}" if away else "")
        self._away.set_visibility(away is not None)
        notes = []
        if history.any_emulated:
            notes.append(
                "Emulated engine: nothing is computed, durations come from a hardware profile. "
                "Rates and latencies here are not measurements of a model."
            )
        if history.damaged:
            notes.append(f"{history.damaged} records or messages could not be read.")
        _fill(self._note, " ".join(notes))
        self._note.set_visibility(bool(notes))

    def _lanes(self, lanes: ui.html, empty: ui.label, now: float) -> None:
        found = views.lanes(self._history, now, self._window)
        empty.set_visibility(not found)
        _fill(lanes, markup.timeline(found, self._window) if found else "")

    def _adapters(self, chart: ui.echart, rows: ui.html, empty: ui.label) -> None:
        found = views.adapters(self._history)
        empty.set_visibility(not found)
        chart.set_visibility(any(r.versions for r in found))
        _draw(chart, charts.quality(found))
        _fill(rows, markup.adapters(found))

    def _show_sessions(self, now: float) -> None:
        found = {v.id: v for v in views.session_views(self._history, now)}
        self._no_session.set_visibility(not found)
        if list(found) != list(self._sessions):
            self._session_box.clear()
            self._sessions = {}
            with self._session_box:
                for session_id in found:
                    with ui.element("section").classes("inner"):
                        head = ui.html("", sanitize=False)
                        self._sessions[session_id] = (head, ui.echart({}).classes("chart"))
        for session_id, view in found.items():
            head, chart = self._sessions[session_id]
            _fill(head, markup.session(view))
            curves = any((*view.steps.values(), view.loss, view.heldout))
            chart.set_visibility(curves)
            _draw(chart, charts.losses(view))

    def _rates(self, now: float) -> views.Rates:
        return views.rates(self._history, now, self._window)

    def _levels(self, now: float) -> views.Levels:
        return views.levels(self._history, now, self._window)

    def _set_window(self, event: Any) -> None:
        self._window = event.value
        self.refresh(force=True)

    def _next_theme(self) -> None:
        values = [theme[0] for theme in THEMES]
        dark, icon, name = THEMES[(values.index(self._dark.value) + 1) % len(THEMES)]
        self._dark.set_value(dark)
        self._theme.props(f"icon={icon}").tooltip(name)


def _card(title: str, *, wide: bool = False) -> ui.element:
    card = ui.element("section").classes("card wide" if wide else "card")
    with card:
        ui.html(escape(title), sanitize=False, tag="h2")
    return card


def _empty(text: str) -> ui.label:
    return ui.label(text.replace("`", "")).classes("empty")


def _fill(part: ui.html, content: str) -> None:
    if part.content != content:
        part.set_content(content)


def _draw(chart: ui.echart, options: charts.Options) -> None:
    if chart.options != options:
        chart.options.clear()
        chart.options.update(options)
        chart.update()
