"""What a running system's replicas reported: their steps, and the hardware profile they make.

``python -m bench.measured --redis URL --out my.yaml`` fits a profile to the steps in the metrics
stream of a running system. Let it first serve requests at several rates (few together, many
together), and train if training is to be simulated. A profile measured in one run lets the
simulator predict others on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import orjson
import yaml
from redis.asyncio import Redis
from redis.exceptions import RedisError

from bench import origin
from services.coordinator.telemetry import Planes, Telemetry, hardware_of
from shared import names
from shared.messages import BODY, StepSample, TrainSample, decode
from shared.profile import Profile
from shared.records import ModelCard, ReplicaRecord

PAGE = 2000
DIFFERENT = "replicas that differ make no common profile: name those of one kind with --replicas"


class TooFew(RuntimeError):
    """The steps do not tell a latency model; the message says how many there were."""


class Unlike(RuntimeError):
    """The replicas do not run alike, or none is there; the message says which there are."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of inference and training steps, oldest first."""

    steps: list[StepSample]
    trained: list[TrainSample]


async def seen(url: str) -> Seen:
    """All samples in the metrics stream."""
    found = Seen(steps=[], trained=[])
    redis, lower = Redis.from_url(url), "-"
    try:
        while page := await redis.xrange(names.METRICS, min=lower, count=PAGE):
            for _, fields in page:
                kind = fields.get(b"kind", b"")
                if kind.startswith(b"step"):
                    found.steps.append(decode(fields[BODY], StepSample))
                elif kind == b"train":
                    found.trained.append(decode(fields[BODY], TrainSample))
            lower = "(" + page[-1][0].decode()
    finally:
        await redis.aclose()
    return found


async def steps(url: str) -> list[StepSample]:
    """All samples of inference steps in the metrics stream, oldest first."""
    return (await seen(url)).steps


def whole(samples: Sequence[StepSample]) -> list[StepSample]:
    """Samples that reach back to the end of the one before, where work went on.

    On a machine that is full a replica also waits for its turn between two steps. That is in no
    step's seconds, but requests feel it. A gap longer than the sample itself is taken for a pause.
    """
    last: dict[str, StepSample] = {}
    found = []
    for sample in samples:
        before = last.get(sample.replica)
        last[sample.replica] = sample
        if before is not None and before.b > len(before.finished):
            gap = sample.time - before.time - sample.seconds
            if 0.0 < gap < sample.seconds:
                sample = msgspec.structs.replace(sample, seconds=sample.seconds + gap)
        found.append(sample)
    return found


def fitted(samples: Sequence[StepSample], trained: Sequence[TrainSample] = ()) -> Planes:
    """The coordinator's fits over replicas that all run alike."""
    telemetry = Telemetry()
    for sample in samples:
        telemetry.describe(sample.replica, "alike")
        telemetry.step(sample)
    for one in trained:
        telemetry.describe(one.replica, "alike")
        telemetry.train(one)
    last = max((s.time for s in samples), default=0.0)
    return telemetry.planes(samples[0].replica, last) if samples else Planes()


def profile_of(
    samples: Sequence[StepSample],
    name: str,
    b_max: int,
    kv_tokens: int,
    trained: Sequence[TrainSample] = (),
) -> Profile:
    """The profile of replicas that all run alike. Raises TooFew."""
    samples = whole(samples)
    planes = fitted(samples, trained)
    model = planes.model()
    if model is None:
        raise TooFew(f"{len(samples)} steps, none with two batch sizes: no latency model")
    rests = [
        s.seconds / max(1, s.steps) / model.t_infer(s.b, s.B)
        for s in samples
        if s.prefill_tokens == 0 and s.b > 0 and model.t_infer(s.b, s.B) > 0
    ]
    emulated = " of emulated replicas" if any(s.emulated for s in samples) else ""
    return Profile(
        name=name,
        source=f"bench/measured.py: {len(samples)} steps{emulated}, {datetime.now(UTC):%Y-%m-%d}",
        coefficients=model,
        b_max=b_max,
        kv_tokens=kv_tokens,
        jitter=_spread(rests),
        numbers=_numbers(planes),
    )


def _numbers(planes: Planes) -> dict[str, str]:
    """How well each line is known, for who reads the file."""
    found = {}
    for name, plane, absent in (
        ("alpha", planes.decode, ""),
        ("pi", planes.prefill, "no step with prompts was seen: 0, prompts cost nothing"),
        ("gamma", planes.train, "no training was seen: 0; simulate with --no-train only"),
    ):
        found[name] = absent if plane is None else f"{plane.samples} samples, R2 {plane.r2:.3f}"
    if planes.decode is not None and not planes.decode.observed_y:
        found["alpha2"] = "no step beside training was seen: a guess, simulate with --no-train only"
    found["jitter"] = "half the distance of the middle two thirds of steps over fitted"
    return found


def _spread(ratios: Sequence[float]) -> float:
    """Half the distance of the middle two thirds: outliers are no jitter."""
    if len(ratios) < 6:
        return 0.0
    sixths = statistics.quantiles(ratios, n=6)
    return round((sixths[-1] - sixths[0]) / 2, 3)


def write(profile: Profile, folder: Path) -> str:
    """The profile as a file; its path."""
    return save(profile, folder / f"{profile.name}.yaml")


def save(profile: Profile, path: Path) -> str:
    """The profile as this file; its path."""
    path.write_text(yaml.safe_dump(msgspec.to_builtins(profile), sort_keys=False), encoding="utf-8")
    return str(path)


# ------------------------------------------------------------ from a running system


async def records(url: str, wanted: Sequence[str]) -> list[tuple[ReplicaRecord, ModelCard | None]]:
    """The replicas, all or those wanted, with the card of their model."""
    redis = Redis.from_url(url)
    try:
        ids = wanted or sorted(i.decode() for i in await redis.smembers(names.REPLICAS))
        found = []
        for replica in ids:
            raw = await redis.hgetall(names.replica(replica))
            if not raw:
                raise Unlike(f"no replica {replica!r} is known there")
            record = ReplicaRecord.from_hash({b"id": replica.encode(), **raw})
            card = await redis.hgetall(names.model(record.model))
            found.append((record, ModelCard.from_hash(card) if card else None))
        return found
    finally:
        await redis.aclose()


async def of_system(url: str, name: str, wanted: Sequence[str]) -> Profile:
    """The profile of a running system's replicas. Raises TooFew, Unlike."""
    known = await records(url, wanted)
    if not known:
        raise Unlike("no replica is known there; start a system (`collm up`) and let it serve")
    kinds: dict[str, list[str]] = {}
    for record, _ in known:
        kind = f"{hardware_of(record)}|b_max {record.b_max}|KV {record.kv_total}"
        kinds.setdefault(kind, []).append(record.id)
    if len(kinds) > 1:
        each = "; ".join(f"{', '.join(ids)}: {kind}" for kind, ids in kinds.items())
        raise Unlike(f"{DIFFERENT} ({each})")
    record, card = known[0]
    ids = {r.id for r, _ in known}
    samples = await seen(url)
    made = profile_of(
        [s for s in samples.steps if s.replica in ids],
        name,
        record.b_max,
        record.kv_total,
        [s for s in samples.trained if s.replica in ids],
    )
    told: dict[str, object] = {"context": record.context} if record.context else {}
    if card is not None:
        told["vocabulary"] = card.vocabulary
    what = where_from([r for r, _ in known], card)
    told["source"] = f"{made.source}; {what['model']}, {what['replicas']}; {what['machine']}"
    told["numbers"] = {**what, **made.numbers}
    return msgspec.structs.replace(made, **told)


def where_from(replicas: Sequence[ReplicaRecord], card: ModelCard | None) -> dict[str, str]:
    """What was measured, on what: replicas that are alike."""
    first = replicas[0]
    dtype = card.dtype if card is not None and card.dtype else "dtype not told"
    here = first.host == socket.gethostname()
    machine = origin.machine() if here else f"host {first.host}, which is not this one"
    count, threads = _of(len(replicas), "replica"), _of(first.thread_slots, "compute thread")
    found = {
        "model": f"{first.model}, {dtype}",
        "engine": first.engine,
        "replicas": f"{count} at once, {threads} each",
        "machine": f"{machine}, on {first.device or 'no device: emulated'}",
    }
    if commit := origin.commit():
        found["commit"] = commit
    return found


def _of(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m bench.measured", description=__doc__)
    p.add_argument("--redis", required=True, metavar="URL", help="of the running system")
    p.add_argument("--out", required=True, type=Path, metavar="FILE.yaml")
    p.add_argument("--replicas", nargs="+", default=[], metavar="ID", help="default: all")
    o = p.parse_args()
    if o.out.suffix not in (".yaml", ".yml"):
        p.error(f"--out {o.out}: a name ending in .yaml expected; `--profile` knows files by it")
    try:
        made = asyncio.run(of_system(o.redis, o.out.stem, o.replicas))
        save(made, o.out)
    except TooFew as e:
        p.exit(1, f"bench.measured: {e}; let the system serve at several rates, then try again\n")
    except Unlike as e:
        p.exit(1, f"bench.measured: {e}\n")
    except (RedisError, OSError, msgspec.ValidationError, orjson.JSONDecodeError) as e:
        p.exit(1, f"bench.measured: {o.redis}, {o.out}: {e}\n")
    for name, text in made.numbers.items():
        print(f"{name}: {text}", file=sys.stderr)
    print(f"{o.out}: {made.coefficients}, jitter {made.jitter}")


if __name__ == "__main__":
    main()
