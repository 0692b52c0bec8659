"""The launcher's terms: its options, what it is shown a tick, what it decides.

Source: CoLLM (arXiv 2604.16400).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from services.launcher import idle
from services.launcher.gathering import Proposal, Rules, Waiting
from services.launcher.windows import Load

SERVING, IDLE, COMBINED = "serving", "idle", "combined"


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names and defaults as in the table of symbols; lengths in ticks."""

    tick: float = 1.0  # Delta, seconds
    t0: int = 30
    t_min: int = 10
    t_max: int = 120
    t_back0: int = 30  # T'0
    decay: float = 0.1
    floors: idle.Floors = idle.Floors()
    headroom: float = 0.2
    rule: str = "guarded"  # "paper" | "guarded"
    min_participants: int = 3
    max_wait: float = 300.0
    least_fall: float = 0.005  # delta
    patience: int = 2
    dedicated: frozenset[str] = frozenset()  # replicas that only train; then no other one does

    @property
    def rules(self) -> Rules:
        return Rules(min_participants=self.min_participants, max_wait=self.max_wait)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One live replica at this tick."""

    id: str
    base: str
    state: str
    load: Load | None = None  # of this tick; None: it sent no sample
    rate: float | None = None  # requests/s at its present (b*, B); None: no latency model
    rate_training: float | None = None  # requests/s at b*(B0)
    finished: float = 0.0  # requests it finished in this tick
    quality: float = 1.0
    data: Mapping[str, int] = {}
    fresh: Mapping[str, int] = {}
    suspended: bool = False  # Combined, but the load left it B = 0


class SessionSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A session that runs: its members and the losses of their rounds."""

    id: str
    adapter: str
    base: str
    clients: tuple[str, ...]
    losses: Mapping[str, Sequence[float]] = {}  # client -> local loss by round
    open: bool = True  # new members may join at the next round


class ToIdle(msgspec.Struct, frozen=True, kw_only=True):
    """Serving -> Idle."""

    replica: str
    why: Mapping[str, float | str]


class Back(msgspec.Struct, frozen=True, kw_only=True):
    """Idle -> Serving: not selected for T' ticks."""

    replica: str
    why: Mapping[str, float | str]


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """A newly Idle replica with data joins a session at its next round."""

    session: str
    replica: str
    why: Mapping[str, float | str]


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """A client leaves its session and serves again."""

    session: str
    replica: str
    why: Mapping[str, float | str]


Decision = ToIdle | Back | Proposal | Join | Leave | Waiting
