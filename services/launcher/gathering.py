"""Which sessions start, who joins, who leaves: the launcher's side of federated fine-tuning.

Source: CoLLM (arXiv 2604.16400), federated fine-tuning; how long a small group waits and what
counts as new data are this project's. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that could train."""

    id: str
    base: str
    quality: float = 1.0
    data: Mapping[str, int] = {}  # adapter -> samples held
    fresh: Mapping[str, int] = {}  # adapter -> samples not trained on in an earlier session


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Start a session."""

    adapter: str
    base: str
    clients: tuple[str, ...]
    server: str
    why: str


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter has data to learn from but not the replicas; says what it waits for."""

    adapter: str
    base: str
    idle: tuple[str, ...]
    wanted: int
    since: float
    why: str


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """min_participants (at most N), and how long to wait for them in seconds."""

    min_participants: int = 3
    max_wait: float = 300.0


def quorum(rules: Rules, replicas: int) -> int:
    """Clients that start a session in a cluster of ``replicas`` live ones of the base."""
    return max(1, min(rules.min_participants, replicas))


def gather(
    holders: Sequence[Holder],
    idle: frozenset[str],
    waiting_since: Mapping[str, float],
    busy: frozenset[str],
    live: Mapping[str, int],
    rules: Rules,
    now: float,
) -> list[Proposal | Waiting]:
    """For each adapter with fresh data: a session, or what it waits for.

    ``holders`` are all live replicas; ``idle`` those that may be taken; ``waiting_since`` when
    an adapter began to wait; ``busy`` adapters in a session already; ``live`` replicas a base.
    A replica is taken once: the adapter with most fresh data chooses first.
    """
    free, out = set(idle), list[Proposal | Waiting]()
    for adapter, base in _wanting(holders, busy):
        here = sorted(h.id for h in holders if h.id in free and h.base == base and _has(h, adapter))
        wanted = quorum(rules, live.get(base, 0))
        waited = now - waiting_since.get(adapter, now)
        if len(here) >= wanted or (here and waited >= rules.max_wait):
            why = (
                f"{len(here)} Idle replicas hold data for it"
                if len(here) >= wanted
                else f"waited {waited:.0f} s for {wanted} Idle replicas with data, has {len(here)}"
            )
            out.append(_propose(holders, adapter, base, here, why))
            free -= set(here)
        else:
            out.append(_wait(holders, adapter, base, here, wanted, waiting_since.get(adapter, now)))
    return out


def _wanting(holders: Sequence[Holder], busy: frozenset[str]) -> list[tuple[str, str]]:
    """(adapter, base) with fresh data somewhere, most first."""
    fresh: dict[tuple[str, str], int] = {}
    for holder in holders:
        for adapter, samples in holder.fresh.items():
            if samples > 0 and adapter not in busy:
                key = (adapter, holder.base)
                fresh[key] = fresh.get(key, 0) + samples
    return sorted(fresh, key=lambda key: (-fresh[key], key))


def _has(holder: Holder, adapter: str) -> bool:
    return holder.data.get(adapter, 0) > 0


def server_of(holders: Sequence[Holder], members: Sequence[str]) -> str:
    """Highest quality; ties go to the lowest id. Raises ValueError without members."""
    chosen = [h for h in holders if h.id in members]
    return min(chosen, key=lambda h: (-h.quality, h.id)).id


def _propose(
    holders: Sequence[Holder], adapter: str, base: str, here: Sequence[str], why: str
) -> Proposal:
    return Proposal(
        adapter=adapter,
        base=base,
        clients=tuple(here),
        server=server_of(holders, here),
        why=why,
    )


def _wait(
    holders: Sequence[Holder],
    adapter: str,
    base: str,
    here: Sequence[str],
    wanted: int,
    since: float,
) -> Waiting:
    hold = [h.id for h in holders if h.base == base and _has(h, adapter)]
    why = f"needs {wanted} Idle replicas with data for it, has {len(here)}"
    if len(hold) < wanted:
        why += f"; only {len(hold)} of the live replicas hold any ({', '.join(sorted(hold))})"
    return Waiting(
        adapter=adapter, base=base, idle=tuple(here), wanted=wanted, since=since, why=why
    )


def completing(
    candidate: str,
    holders: Sequence[Holder],
    idle: frozenset[str],
    waiting_since: Mapping[str, float],
    busy: frozenset[str],
    live: Mapping[str, int],
    rules: Rules,
    now: float,
) -> tuple[str, ...] | None:
    """The members of the session that ``candidate`` would complete by going Idle, or None."""
    after = gather(holders, idle | {candidate}, waiting_since, busy, live, rules, now)
    for result in after:
        if isinstance(result, Proposal) and candidate in result.clients:
            return result.clients
    return None


def converged(losses: Sequence[float], least_fall: float, patience: int) -> bool:
    """Whether the local loss did not fall by ``least_fall`` (relative) for ``patience`` rounds.

    Compared with the best before, so that a client that swings does not stay for ever.
    """
    if len(losses) <= patience:
        return False
    best = min(losses[:-patience])
    return all(loss > best * (1 - least_fall) for loss in losses[-patience:])
