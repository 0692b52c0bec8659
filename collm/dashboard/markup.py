"""Parts of the page that are no charts, as HTML; everything from outside is escaped. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape

from collm.dashboard.charts import STATES
from collm.dashboard.history import Event
from collm.dashboard.views import AdapterRow, Lane, Segment, SessionView, Tile

PLAIN, UNKNOWN = "#3b82c4", "#8b93a1"  # kinds that are no state, states not known here
SHOWN_VERSIONS = 6  # the newest ones of an adapter


def tiles(found: Iterable[Tile]) -> str:
    """The row of numbers at the top."""
    return "".join(
        f'<div class="tile"><div class="what">{escape(t.label)}</div>'
        f'<div class="number">{escape(t.value)}</div><div class="hint">{escape(t.hint)}</div></div>'
        for t in found
    )


def legend() -> str:
    """The colours of the states."""
    return "".join(
        f'<span class="key"><i style="background:{colour}"></i>{state}</span>'
        for state, colour in STATES.items()
    )


def timeline(lanes: Iterable[Lane], window: float) -> str:
    """One row a replica: name, now, and its states from ``window`` seconds ago to now."""
    rows = "".join(_lane(lane) for lane in lanes)
    ends = f"<span>{span(window)} ago</span><span>{span(window / 2)}</span><span>now</span>"
    return f'{rows}<div class="scale"><div></div><div>{ends}</div></div>'


def _lane(lane: Lane) -> str:
    bars = "".join(
        f'<i style="left:{100 * s.left:.2f}%;width:{100 * s.width:.2f}%;'
        f'background:{STATES.get(s.state, UNKNOWN)}" title="{_tip(s)}">'
        "</i>"
        for s in lane.segments
    )
    numbers = [f"b {lane.b:.1f}", f"b* {lane.ideal or '–'}", f"limit {lane.limit}"]
    if lane.micro_batch:
        numbers.append(f"B {lane.micro_batch}")
    if lane.kv is not None:
        numbers.append(f"KV {100 * lane.kv:.0f} %")
    silent = ' <b class="bad">no heartbeat</b>' if lane.silent else ""
    return (
        f'<div class="lane"><div class="who"><span class="name">{escape(lane.replica)}</span> '
        f'<span class="state" style="--c:{STATES.get(lane.state, UNKNOWN)}">'
        f"{escape(lane.state)}</span>{silent}"
        f'<div class="hint">{escape(" · ".join(numbers))}</div></div>'
        f'<div class="bar" role="img" aria-label="states of {escape(lane.replica)}">{bars}</div>'
        "</div>"
    )


def _tip(s: Segment) -> str:
    reason = f"\n{s.by}: {s.why}" if s.why else ""
    return escape(f"{s.state} for {span(s.end - s.start)}, from {clock(s.start)}{reason}")


def adapters(rows: Iterable[AdapterRow]) -> str:
    """One block an adapter with its newest versions."""
    return "".join(_adapter(row) for row in rows)


def _adapter(row: AdapterRow) -> str:
    chips = []
    for round_, quality, promoted, version in row.versions[-SHOWN_VERSIONS:][::-1]:
        kind = "current" if version == row.current else "kept" if not promoted else ""
        tip = f"round {round_}, Q {quality:.3f}" + ("" if promoted else ", not promoted")
        chips.append(
            f'<span class="chip {kind}" title="{escape(tip, quote=True)}">'
            f"{escape(version)} · {quality:.2f}</span>"
        )
    older = len(row.versions) - len(chips)
    if older > 0:
        chips.append(f'<span class="hint">and {older} older</span>')
    facts = [f"on {row.base}", f"rank {row.rank}", f"served by {row.serving}"]
    if row.heldout is not None:
        facts.append(f"held-out {row.heldout:.3f} nats / token")
    if row.tenant:
        facts.append(f"tenant {row.tenant}")
    return (
        f'<div class="item"><div><span class="name">{escape(row.name)}</span> '
        f'<span class="hint">{escape(" · ".join(facts))}</span>'
        f'<span class="q">Q {row.quality:.3f}</span></div>'
        f'<div class="chips">{"".join(chips) or "no version yet"}</div></div>'
    )


def session(view: SessionView) -> str:
    """The head of a session's card."""
    clients = ", ".join(
        f"{c} (B {view.micro_batches[c]})" if c in view.micro_batches else c for c in view.clients
    )
    facts = [f"round {view.round}", f"{view.done} done", f"{len(view.clients)} clients: {clients}"]
    if view.remaining is not None:
        facts.append(
            f"{span(view.remaining)} of training left" if view.remaining > 0 else "deadline passed"
        )
    colour = STATES["stopped"] if view.phase == "ended" else STATES["combined"]
    why = view.ended or view.why
    return (
        f'<div><span class="name">{escape(view.adapter)}</span> '
        f'<span class="state" style="--c:{colour}">{escape(view.phase)}</span></div>'
        f'<div class="hint">{escape(" · ".join(facts))}</div>'
        + (f'<div class="hint">{escape(why)}</div>' if why else "")
    )


def events(found: Iterable[Event]) -> str:
    """The audit log, newest first."""
    return "".join(_event(e) for e in found)


def _event(event: Event) -> str:
    fields = " ".join(
        f'<span class="field"><em>{escape(k)}</em> {escape(v[:200])}</span>'
        for k, v in event.fields.items()
    )
    colour = PLAIN
    if event.kind == "state":
        colour = STATES.get(event.fields.get("to", ""), UNKNOWN)
    return (
        f'<div class="event"><time>{clock(event.time)}</time>'
        f'<span class="state" style="--c:{colour}">{escape(event.kind)}</span>'
        f"<div>{fields}</div></div>"
    )


def clock(seconds: float) -> str:
    """Time of day in UTC, as the page says at its top."""
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def span(seconds: float) -> str:
    """A duration with one unit: 40 s, 2.5 min, 3 h."""
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    value, unit = (seconds / 60, "min") if seconds < 7200 else (seconds / 3600, "h")
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"
