"""What a running system's replicas reported: their steps, and the hardware profile they make.

A profile measured in one run lets the simulator predict others on the same machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import yaml
from redis.asyncio import Redis

from services.coordinator.telemetry import Telemetry
from shared import names
from shared.messages import BODY, StepSample, decode
from shared.profile import Profile

PAGE = 2000


class TooFew(RuntimeError):
    """The steps do not tell a latency model; the message says how many there were."""


async def steps(url: str) -> list[StepSample]:
    """All samples of inference steps in the metrics stream, oldest first."""
    found: list[StepSample] = []
    redis, lower = Redis.from_url(url), "-"
    try:
        while page := await redis.xrange(names.METRICS, min=lower, count=PAGE):
            for _, fields in page:
                if fields.get(b"kind", b"").startswith(b"step"):
                    found.append(decode(fields[BODY], StepSample))
            lower = "(" + page[-1][0].decode()
    finally:
        await redis.aclose()
    return found


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


def profile_of(samples: Sequence[StepSample], name: str, b_max: int, kv_tokens: int) -> Profile:
    """The profile of replicas that all run alike. Raises TooFew."""
    samples = whole(samples)
    telemetry = Telemetry()
    for sample in samples:
        telemetry.describe(sample.replica, "alike")
        telemetry.step(sample)
    last = max((s.time for s in samples), default=0.0)
    model = telemetry.planes(samples[0].replica, last).model() if samples else None
    if model is None:
        raise TooFew(f"{len(samples)} steps, none with two batch sizes: no latency model")
    rests = [
        s.seconds / max(1, s.steps) / model.t_infer(s.b, 0.0)
        for s in samples
        if s.prefill_tokens == 0 and s.b > 0 and model.t_infer(s.b, 0.0) > 0
    ]
    return Profile(
        name=name,
        source=f"bench/measured.py: {len(samples)} steps, {datetime.now(UTC):%Y-%m-%d}",
        coefficients=model,
        b_max=b_max,
        kv_tokens=kv_tokens,
        jitter=_spread(rests),
    )


def _spread(ratios: Sequence[float]) -> float:
    """Half the distance of the middle two thirds: outliers are no jitter."""
    if len(ratios) < 6:
        return 0.0
    sixths = statistics.quantiles(ratios, n=6)
    return round((sixths[-1] - sixths[0]) / 2, 3)


def write(profile: Profile, folder: Path) -> str:
    """The profile as a file; its path."""
    path = folder / f"{profile.name}.yaml"
    path.write_text(yaml.safe_dump(msgspec.to_builtins(profile)), encoding="utf-8")
    return str(path)
