"""The verdict: what the clients saw against golden answers, and what is left in Redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.load import Record
from tests.chaos.model import MODEL, Golden

GATEWAY_AWAY = 15.0  # seconds after a gateway's death in which a cut connection is its doing


@dataclass
class Verdict:
    """Counts, and every violation in words."""

    requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    duplicated: int = 0
    wrong: int = 0
    unverified: int = 0  # their adapter version is no longer on disk
    details: list[str] = field(default_factory=list)


def judge(
    records: Iterable[Record],
    golden: Golden,
    folders: Mapping[tuple[str, str], str],
    gateway_deaths: Iterable[float],
) -> Verdict:
    """``folders``: (adapter, version) -> PEFT folder; ``gateway_deaths``: monotonic seconds."""
    verdict, deaths = Verdict(), list(gateway_deaths)
    for record in records:
        verdict.requests += 1
        verdict.outcomes[record.outcome] += 1
        if record.outcome == "error":
            verdict.errors[record.detail[:60]] += 1
        _ended_once(record, verdict, deaths)
        _said_the_right_thing(record, verdict, golden, folders)
    return verdict


def _ended_once(record: Record, verdict: Verdict, deaths: list[float]) -> None:
    if record.outcome == "open":
        verdict.lost += 1
        verdict.details.append(f"request {record.number} never ended")
    elif record.outcome in ("broken", "unreachable"):
        if not any(record.started - GATEWAY_AWAY < d < record.ended for d in deaths):
            verdict.lost += 1
            verdict.details.append(f"request {record.number} broke off: {record.detail}")
    elif record.outcome == "error" and record.status == 500:
        verdict.lost += 1
        verdict.details.append(f"request {record.number}: {record.detail}")
    for fault in record.faults:
        verdict.wrong += 1
        verdict.details.append(f"request {record.number} ({record.outcome}): {fault}")


def _said_the_right_thing(
    record: Record, verdict: Verdict, golden: Golden, folders: Mapping[tuple[str, str], str]
) -> None:
    if not record.text:
        if record.outcome == "answered":
            verdict.wrong += 1
            verdict.details.append(f"request {record.number}: an empty answer")
        return
    adapter = None if record.model == MODEL else record.model
    if adapter is not None and record.version is None:
        verdict.wrong += 1
        verdict.details.append(f"request {record.number}: no adapter version in the response")
        return
    path = folders.get((adapter, record.version)) if adapter and record.version else None
    if adapter is not None and path is None:
        verdict.unverified += 1
        return
    right = golden.text(record.prompt, record.tokens, adapter, record.version, path)
    complete = record.outcome == "answered"
    if record.text == right or (not complete and right.startswith(record.text)):
        return
    kind = "duplicated" if _repeats(record.text, right) else "wrong"
    setattr(verdict, kind, getattr(verdict, kind) + 1)
    verdict.details.append(
        f"request {record.number} ({record.model}, {record.version}, stream={record.stream}, "
        f"{record.outcome}): {record.text!r} is not {right!r}"
    )


def _repeats(text: str, right: str) -> bool:
    """Right up to some point, then a piece that was said before."""
    same = next((i for i, (a, b) in enumerate(zip(text, right, strict=False)) if a != b), None)
    if same is None:
        return len(text) > len(right)
    return len(text) > len(right) and text[same : same + 4] in right[:same]


def adapters_load(golden: Golden, folders: Mapping[tuple[str, str], str]) -> list[str]:
    """What is registered must load; returns complaints."""
    complaints = []
    for (name, version), path in folders.items():
        if not Path(path).is_dir():
            complaints.append(f"{name}@{version}: {path} is no folder")
            continue
        text = golden.text((40, 41, 42), 4, name, version, path)
        if not text:
            complaints.append(f"{name}@{version}: no text")
    return complaints
