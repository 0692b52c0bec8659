"""One simulation as plain data: saved beside its results, enough to repeat it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import yaml

from services.dispatcher.policies.registry import create
from shared import profile
from shared.quality import MIN_CE
from sim.federation import Federation
from sim.replica import Batching
from sim.rounds import Federated, Rounds
from sim.training import Curve
from sim.workload import Align, Assignment, Count, Seed, Workload, jobs
from sim.world import Delays, World

CURVES = Path(__file__).resolve().parent.parent / "config" / "curves"
# Fields that hold one of a few names; any other would silently mean the default.
CHOICES: dict[str, tuple[str, ...]] = {
    "workload.trace_align": get_args(Align),
    "workload.adapter_assignment": get_args(Assignment),
    "batching.batching": ("continuous", "static"),
    "batching.lora": ("unmerged", "merged", "dynamic"),
    "federated.launcher.rule": ("paper", "guarded"),
}
# Numbers of other modules' structs that nothing works without.
ABOVE_0 = (
    "batching.max_step_tokens",
    "batching.step_seconds",
    "federated.B0",
    "federated.B_max",
    "federated.local_steps",
    "federated.max_rounds",
    "federated.launcher.tick",
)
MOST_REPLICAS = 100_000  # 10,000 take 280 MB; what is far beyond does not fit in memory
RANGES = {">": "above", ">=": "at least", "<": "below", "<=": "at most"}


class ScenarioError(ValueError):
    """The scenario makes no sense; the message says what to change.

    Where one value is at fault ``field`` is its path in the scenario, ``wanted`` what it should be.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field, self.wanted = field, message


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the outcome."""

    profile: str = "h20-8b"
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)] = 16
    policy: str = "collm"
    policy_options: dict[str, Any] = {}
    workload: Workload = Workload()
    batching: Batching = Batching()
    delays: Delays = Delays()
    b_limit: Count | None = None
    federated: Federated | None = None  # None: nothing trains
    curve: str = "smollm2"
    seed: Seed = 0
    learn: bool = False  # the policy fits its latencies from steps, as before a coordinator has any

    def saved(self) -> dict[str, Any]:
        """As plain JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        return plain


def read(path: Path) -> Scenario:
    """A saved scenario: ``scenario.json``, or a result that holds one. Raises ScenarioError."""
    try:
        plain = msgspec.json.decode(path.read_bytes())
        if isinstance(plain, dict):
            plain = plain.get("scenario", plain)
        return _convert(plain)
    except OSError as e:
        raise ScenarioError(f"{path}: cannot be read: {e.strerror}") from e
    except (msgspec.DecodeError, ScenarioError) as e:  # also what does not fit: ValidationError
        raise ScenarioError(
            f"{path}: {e}; a scenario.json as `collm simulate --out FOLDER` saves it is expected"
        ) from e


def check(scenario: Scenario) -> None:
    """Whether every value is one that means something. Raises ScenarioError, which names it."""
    try:
        _convert(scenario.saved())
    except msgspec.ValidationError as e:
        wanted, _, field = str(e).partition(" - at `$.")
        raise ScenarioError(_in_words(wanted), field.rstrip("`")) from e


def _in_words(wanted: str) -> str:
    """A range of msgspec's as one says it."""
    found = re.fullmatch(r"Expected `\w+` ([<>]=?) (\S+)", wanted)
    if found is None:
        return wanted[:1].lower() + wanted[1:]
    return f"{RANGES[found[1]]} {float(found[2]):,.10g} expected"


def _convert(plain: Any) -> Scenario:
    """Raises ScenarioError, ValidationError."""
    for field, names in CHOICES.items():
        name = _at(plain, field)
        if isinstance(name, str) and name not in names:
            raise ScenarioError(f"one of {', '.join(names)} expected, not {name!r}", field)
    if _at(plain, "batching.lora") == "dynamic" and _at(plain, "batching.batching") == "static":
        raise ScenarioError(
            "dynamic chooses each step's batch anew: static batches have none", "batching.lora"
        )
    for field, number in _numbers(plain):
        if isinstance(number, float) and not math.isfinite(number):
            raise ScenarioError(f"a finite number expected, not {number}", field)
        if number <= 0 and (field in ABOVE_0 or field.startswith("workload.slos.")):
            raise ScenarioError(f"above 0 expected, not {number}", field)
        if number < 0 and field.startswith("delays."):
            raise ScenarioError(f"at least 0 expected, not {number}", field)
    return msgspec.convert(plain, Scenario, dec_hook=_path)


def _at(plain: Any, field: str) -> Any:
    for name in field.split("."):
        plain = plain.get(name) if isinstance(plain, dict) else None
    return plain


def _numbers(plain: Any, field: str = "") -> Iterator[tuple[str, float]]:
    """Every number with its path."""
    if isinstance(plain, int | float):
        yield field, plain
    elif isinstance(plain, dict):
        for name, value in plain.items():
            yield from _numbers(value, f"{field}.{name}" if field else name)
    elif isinstance(plain, list | tuple):
        for number, value in enumerate(plain):
            yield from _numbers(value, f"{field}[{number}]")


def _path(kind: type, value: Any) -> Any:
    """The one type of a scenario that JSON does not have."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"a path expected, not {value!r}")


def load_curve(name: str) -> Curve:
    """A loss curve of ``config/curves`` or of a path. Raises ScenarioError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else CURVES / f"{name}.yaml"
    try:
        return msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), Curve)
    except FileNotFoundError as e:
        known = ", ".join(sorted(p.stem for p in CURVES.glob("*.yaml")))
        raise ScenarioError(f"no loss curve {name!r} ({path}); known: {known}") from e
    except (yaml.YAMLError, msgspec.ValidationError) as e:
        raise ScenarioError(f"{path}: {e}") from e


def build(scenario: Scenario) -> World:
    """The cluster at time 0. Raises ScenarioError, ProfileError, TraceError, UnknownPolicy."""
    check(scenario)
    work = scenario.workload
    if bool(work.traces) + bool(work.streams) + (work.rate is not None) != 1:
        raise ScenarioError(
            "a workload has one of: traces, streams, a rate (--trace FILE or --rate NUMBER)"
        )
    endless = work.rate is not None or work.streams or work.repeat
    if endless and work.limit is None and work.duration is None:
        raise ScenarioError(
            "this workload never ends: give a limit or a duration (--limit or --hours)"
        )
    _check_tags(work)
    hardware = profile.load(scenario.profile)
    world = World(
        create(scenario.policy, **scenario.policy_options),
        [hardware] * scenario.replicas,
        jobs(work),
        batching=scenario.batching,
        delays=scenario.delays,
        b_limit=scenario.b_limit,
        seed=scenario.seed,
        adapters=work.adapters,
        learn=scenario.learn,
    )
    curve = load_curve(scenario.curve)
    world.base_quality = 1.0 / max(curve.cross_entropy(0.0), MIN_CE)
    if scenario.federated is not None:
        world.federation = Federation(world, scenario.federated, curve)
    return world


def _check_tags(work: Workload) -> None:
    """A limit for requests that do not come would leave all others without one, unsaid."""
    tags = [tag for tag, _ in work.traces] + [stream.tag for stream in work.streams]
    strange = sorted(work.slos.keys() - {"", *tags})
    if strange:
        there = f"those of this workload: {', '.join(tags)}" if tags else "at a rate none has one"
        raise ScenarioError(f"no request has the tag {strange[0]!r}; {there}", "workload.slos")


def run(scenario: Scenario, watch: Callable[[World], None] | None = None) -> dict[str, Any]:
    """Simulate to the last answer; ``watch`` is called now and then for a progress bar."""
    started = time.process_time()
    world = build(scenario)
    world.run(watch)
    duration, drained = world.recorder.active_until, world.ended
    total = world.recorder.total
    result: dict[str, Any] = {
        "simulated": True,
        "profile": scenario.profile,
        "replicas": scenario.replicas,
        "policy": scenario.policy,
        **total.summary(duration, drained),
        "tags": {
            tag: tally.summary(duration, drained) for tag, tally in world.recorder.tags.items()
        },
        "utilisation": _mean_busy(world),
        "events": world.kernel.handled,
        "decisions": world.decisions,
        "overhead": _overhead(world),
        "above_one_share": world.recorder.above_one / max(1, total.completed),
        "cpu_seconds": time.process_time() - started,
    }
    if world.federation is not None:
        result["training"] = _training(world.federation.rounds, drained, scenario.replicas)
    result["by_time"] = world.recorder.by_time()
    result["scenario"] = scenario.saved()
    return result


def _overhead(world: World) -> dict[str, float]:
    """Shares of the time that answers in time took: kept back on purpose (virtual time), decided on
    (this machine's processor; divided by the answers' virtual seconds)."""
    recorder = world.recorder
    seconds = max(recorder.seconds, 1e-9)
    rows = zip(recorder.series.values("held"), recorder.series.values("seconds"), strict=True)
    shares = [held / taken for held, taken in rows if taken > 0]
    return {
        "hold_share": recorder.held / seconds,
        "hold_share_worst": max(shares, default=0.0),
        "hold_bucket_seconds": recorder.series.width,
        "decision_share": world.decision_seconds / seconds,
        "decision_ms": 1e3 * world.decision_seconds / max(1, world.decisions),
    }


def _mean_busy(world: World) -> float:
    seconds = max(world.ended, 1e-9) * len(world.replicas)
    return sum(r.busy for r in world.replicas.values()) / seconds


def _training(rounds: Rounds, duration: float, replicas: int) -> dict[str, Any]:
    return {
        "rounds": rounds.ended,
        "samples": rounds.samples,
        "samples_per_s": rounds.samples / max(duration, 1e-9),
        "micro_steps": rounds.micro_steps,
        "compute_share": rounds.active_seconds / max(duration * replicas, 1e-9),
        "quality_at_end": rounds.quality,
        "cross_entropy": [[round(t, 1), round(ce, 5)] for t, ce in rounds.history],
    }
