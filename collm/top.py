"""What `collm top` shows: the cluster now and over the last seconds, as a rich renderable."""

from __future__ import annotations

import time
from collections import deque

import msgspec
from redis.asyncio import Redis
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from collm import cluster, moments
from shared import names
from shared.messages import BODY, DecodeError, StepSample, TrainSample, decode_any
from shared.records import ReplicaRecord

WINDOW = 10.0  # seconds of samples that rates are taken over
PAGE = 1000  # entries read at once; as many of the past at the first look
HIDDEN = ("id", "kind", "time")  # fields of an event that its line does not repeat
_STATES = {
    "serving": "green",
    "combined": "magenta",
    "idle": "cyan",
    "starting": "yellow",
    "draining": "yellow",
    "dead": "red",
    "damaged": "red",
}


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the cluster."""

    time: float
    queues: cluster.Queues
    replicas: list[ReplicaRecord]
    events: list[dict[str, str]]  # newest first; "id" is the entry's
    adapters: list[tuple[str, str, float]]  # name, current version, quality


class Watcher:
    """Takes looks and remembers the steps of the last seconds. Seconds, tokens."""

    def __init__(self, redis: Redis, window: float = WINDOW) -> None:
        self._redis, self._window = redis, window
        self._last = ""
        self._steps: deque[StepSample] = deque()
        self.training: dict[str, TrainSample] = {}  # replica -> its newest optimiser step

    async def look(self) -> Look:
        """Read everything that is shown."""
        await self._read_samples()
        replicas = await cluster.replicas(self._redis)
        raw = await self._redis.xrevrange(names.EVENTS, count=8)
        return Look(
            time=await self._now(),
            queues=await cluster.queues(self._redis),
            replicas=replicas,
            events=[_event(entry_id, fields) for entry_id, fields in raw],
            adapters=await self._adapters(),
        )

    async def _read_samples(self) -> None:
        if not self._last:
            for entry_id, fields in reversed(
                await self._redis.xrevrange(names.METRICS, count=PAGE)
            ):
                self._last = entry_id.decode()
                self._take(fields.get(BODY, b""))
            self._last = self._last or "0-0"
        while True:
            page = await self._redis.xrange(names.METRICS, min=f"({self._last}", count=PAGE)
            for entry_id, fields in page:
                self._last = entry_id.decode()
                self._take(fields.get(BODY, b""))
            if len(page) < PAGE:
                break
        oldest = await self._now() - self._window
        while self._steps and self._steps[0].time < oldest:
            self._steps.popleft()

    async def _now(self) -> float:
        """Redis seconds, which all that is shown is stamped with."""
        seconds, micros = await self._redis.time()
        return float(seconds) + float(micros) / 1e6

    def _take(self, body: bytes) -> None:
        try:
            message = decode_any(body)
        except DecodeError:
            return  # its reader proper puts it to the dead letters
        if isinstance(message, StepSample):
            self._steps.append(message)
        elif isinstance(message, TrainSample):
            self.training[message.replica] = message

    async def _adapters(self) -> list[tuple[str, str, float]]:
        found = []
        for name in sorted(n.decode() for n in await self._redis.smembers(names.ADAPTERS)):
            version, quality = await self._redis.hmget(names.adapter(name), "current", "quality")
            found.append((name, (version or b"").decode(), float(quality or 0)))
        return found

    def rate(self, replica: str) -> float:
        """Output tokens per second of a replica over the window."""
        return sum(s.decode_tokens for s in self._steps if s.replica == replica) / self._window

    def step(self, replica: str) -> float:
        """Mean duration of an engine step in the window, seconds; 0 without one."""
        mine = [s for s in self._steps if s.replica == replica and s.steps]
        steps = sum(s.steps for s in mine)
        return sum(s.seconds for s in mine) / steps if steps else 0.0


def render(look: Look, watcher: Watcher) -> RenderableType:
    """One screen."""
    total = sum(watcher.rate(r.id) for r in look.replicas)
    waiting = sum(
        s.length for name, s in look.queues.streams.items() if name.startswith("collm:requests:")
    )
    running = sum(r.in_flight for r in look.replicas)
    head = Text.assemble(
        (time.strftime("%H:%M:%S  ", time.localtime(look.time)), "dim"),
        (f"{total:.0f} tokens/s", "bold"),
        f"   {running} in flight   {waiting} queued   {len(look.replicas)} replicas",
    )
    parts = [head, Text(), _replicas(look, watcher), Text(), *_training(look, watcher)]
    return Group(*parts, _streams(look), Text(), *_rest(look))


def _replicas(look: Look, watcher: Watcher) -> Table:
    table = Table(box=None, pad_edge=False, expand=True)
    # On a narrow screen the model's name gives way, not what tells replicas apart.
    names = max((len(r.id) for r in look.replicas), default=0)
    states = max((len(r.state) for r in look.replicas), default=0)
    table.add_column("replica", no_wrap=True, min_width=names)
    table.add_column("model", no_wrap=True, overflow="ellipsis")
    table.add_column("state", no_wrap=True, min_width=states)
    table.add_column("for")
    for title in ("flight/b", "b*", "B", "KV %", "step ms", "tok/s"):
        table.add_column(title, justify="right")
    table.add_column("adapters")
    for r in look.replicas:
        used = 100 * (1 - r.kv_free / r.kv_total) if r.kv_total else 0.0
        table.add_row(
            r.id,
            r.model + (" (emulated)" if r.engine == "emulated" else ""),
            Text(r.state, style=_STATES.get(r.state, "")),
            _age(look.time - r.since),
            f"{r.in_flight}/{r.b}",
            str(r.b_star or "-"),
            str(r.B or "-"),
            f"{used:.0f}",
            f"{1e3 * watcher.step(r.id):.1f}",
            f"{watcher.rate(r.id):.0f}",
            " ".join(f"{n}@{v}" for n, v in sorted(r.adapters.items())),
        )
    return table


def _training(look: Look, watcher: Watcher) -> list[RenderableType]:
    """Where the training of each combined replica is: its last optimiser step."""
    combined = [r for r in look.replicas if r.state == "combined"]
    if not combined:
        return []
    table = Table(
        *("training", "adapter", "round", "step", "B", "loss", "micro-step s", "waited s", "ago"),
        box=None, pad_edge=False,
    )  # fmt: skip
    for r in combined:
        s = watcher.training.get(r.id)
        if s is None or s.time < r.since:
            table.add_row(r.id, "-", "-", "none yet", style="dim")
            continue
        loss = "-" if s.loss is None else f"{s.loss:.3f}"
        took = (f"{s.micro_seconds:.2f}", f"{s.wait_seconds:.1f}", _age(look.time - s.time))
        table.add_row(r.id, s.adapter, str(s.round), str(s.step), str(s.B), loss, *took)
    return [table, Text()]


def _streams(look: Look) -> Table:
    table = Table("stream", "length", "pending", box=None, pad_edge=False)
    full = [(n, s) for n, s in look.queues.streams.items() if s.length or s.pending]
    for name, s in full[:8]:
        table.add_row(name, str(s.length), str(s.pending))
    if not full:
        table.add_row("all drained", "0", "0", style="dim")
    return table


def _rest(look: Look) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if look.adapters:
        table = Table("adapter", "version", "Q", box=None, pad_edge=False)
        for name, version, quality in look.adapters[:8]:
            table.add_row(name, version or "-", f"{quality:.3f}")
        parts += [table, Text()]
    for event in look.events:
        kind = event.get("kind", "?")
        rest = " ".join(f"{k}={v}" for k, v in event.items() if v and k not in HIDDEN)
        line = f"{moments.stamp(moments.of_entry(event['id']))} {kind:<12} {rest}"
        parts.append(Text(line, style="dim", no_wrap=True, overflow="ellipsis"))
    return parts


def _event(entry_id: bytes, fields: dict[bytes, bytes]) -> dict[str, str]:
    plain = {k.decode(): v.decode(errors="replace") for k, v in fields.items()}
    return {**plain, "id": entry_id.decode()}


def _age(seconds: float) -> str:
    if seconds < 0 or seconds > 10 * 365 * 86400:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
