"""``collm simulate``: what this system would do on a cluster that is not here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import orjson
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from collm.console import err, fail, tell
from loadgen import trace
from services.dispatcher.policies.registry import CHOICES, UnknownPolicy
from shared import slo
from shared.profile import ProfileError
from sim import report, what_if
from sim.replica import Batching
from sim.rounds import Federated
from sim.scenario import Scenario, ScenarioError, read, run
from sim.workload import Align, Workload
from sim.world import World

Option = typer.Option
BAD_INPUT = (
    ProfileError,
    ScenarioError,
    UnknownPolicy,
    report.NoPlots,
    trace.TraceError,
    ValueError,
)
POLICY_HELP = f"Dispatch policy: {CHOICES} of your own"
STATIC_HELP = "Static batches instead of continuous ones: the paper's PEFT has them (--policy peft)"
TRAIN_HELP = "Fine-tune when idle; in published comparisons only collm does, the others --no-train"
ADAPTERS_HELP = "Number of adapters, popularity by Zipf's law"
TARGET_HELP = "Attainment to sustain, of the unloaded one: above 0, at most 1"
OUT_HELP = "Folder for report.html and result.json (without --rate-scale: what_if.json)"
FILE_HELP = "scenario.json (or what_if.json) of a run with --out, run again"
BESIDE_A_FILE = {"file", "out"}  # options that --scenario leaves open
# What options set, by its path in the scenario. `--scenario` and `--out` set none.
OPTION_OF = {
    "profile": "--profile",
    "replicas": "--replicas",
    "policy": "--policy",
    "policy_options": "--policy-options",
    "batching.batching": "--static",
    "federated": "--train",
    "curve": "--curve",
    "seed": "--seed",
    "workload.seed": "--seed",
    "workload.traces": "--trace",
    "workload.trace_align": "--trace-align",
    "workload.rate": "--rate",
    "workload.burstiness": "--burstiness",
    "workload.slos": "--slo",
    "workload.rate_scale": "--rate-scale",
    "workload.limit": "--limit",
    "workload.duration": "--hours",
    "workload.repeat": "--hours",
    "workload.diurnal": "--diurnal",
    "workload.prompt_scale": "--prompt-scale",
    "workload.output_scale": "--output-scale",
    "workload.adapters": "--adapters",
    "target": "--target",  # of a what-if, no field of the scenario
}
WHAT_IF_REQUESTS = 8_000  # requests of each trial of a what-if, unless --limit says otherwise


def register(app: typer.Typer) -> None:
    """Add ``collm simulate``."""
    app.command()(simulate)


def simulate(
    context: typer.Context,
    profile: Annotated[str, Option(help="Hardware profile: a name or a YAML file")] = "h20-8b",
    replicas: Annotated[int, Option(help="Replicas of the cluster")] = 16,
    policy: Annotated[str, Option(help=POLICY_HELP)] = "collm",
    policy_options: Annotated[
        str, Option(metavar="JSON", help='Options of the policy: {"on_overload": "shed"}')
    ] = "{}",
    traces: Annotated[
        list[str] | None, Option("--trace", metavar="[TAG=]CSV", help="Azure trace; repeatable")
    ] = None,
    align: Annotated[
        str, Option("--trace-align", help="clock: as recorded; start: every trace begins at 0")
    ] = "clock",
    rate: Annotated[float | None, Option(help="Requests/s at random instead of a trace")] = None,
    burstiness: Annotated[float, Option(help="Gamma shape; 1 is Poisson")] = 1.0,
    limits: Annotated[
        list[str] | None,
        Option("--slo", metavar="[TAG/]NAME:VALUE", help="e2e:2s, ttft:200, tpot:50; repeatable"),
    ] = None,
    scale: Annotated[
        float | None,
        Option("--rate-scale", help="Simulate this load; without it: find the largest"),
    ] = None,
    limit: Annotated[int | None, Option(help="Requests")] = None,
    hours: Annotated[float | None, Option(help="Hours of arrivals; a trace is repeated")] = None,
    diurnal: Annotated[float, Option(help="Amplitude of a daily rhythm, 0 to below 1")] = 0.0,
    prompt_scale: Annotated[float, Option(help="Multiplies prompt lengths")] = 1.0,
    output_scale: Annotated[float, Option(help="Multiplies output lengths")] = 1.0,
    adapters: Annotated[int, Option(min=0, help=ADAPTERS_HELP)] = 0,
    static: Annotated[bool, Option(help=STATIC_HELP)] = False,
    train: Annotated[bool, Option("--train/--no-train", help=TRAIN_HELP)] = True,
    curve: Annotated[str, Option(help="Loss curve of the training")] = "smollm2",
    target: Annotated[float, Option(help=TARGET_HELP)] = 0.9,
    seed: Annotated[int, Option()] = 0,
    file: Annotated[
        Path | None,
        Option("--scenario", metavar="FILE", help=FILE_HELP),
    ] = None,
    out: Annotated[Path | None, Option(help=OUT_HELP)] = None,
) -> None:
    """Simulate a cluster: one load with --rate-scale, else the largest it sustains."""
    try:
        if out is not None:
            _look_at(out)
        if file is not None:
            _says_everything(context)
            again, asked = read(file), what_if.target_of(file)
            _show(_one(again, out) if asked is None else _what_if(again, asked), out)
            return
        work = Workload(
            traces=tuple(trace.parse_argument(t) for t in traces or ()),
            trace_align=cast(Align, align),  # looked at with all others
            rate=rate,
            burstiness=burstiness,
            prompt_scale=prompt_scale,
            output_scale=output_scale,
            rate_scale=1.0 if scale is None else scale,
            limit=limit,
            duration=None if hours is None else hours * 3600,
            repeat=hours is not None and bool(traces),
            diurnal=diurnal,
            seed=seed,
            adapters=tuple(f"adapter-{k}" for k in range(adapters)),
            slos=slo.parse(limits or ()),
        )
        scenario = Scenario(
            profile=profile,
            replicas=replicas,
            policy=policy,
            policy_options=_options(policy_options),
            workload=work,
            batching=Batching(batching="static" if static else "continuous"),
            federated=Federated() if train else None,
            curve=curve,
            seed=seed,
        )
        _show(_what_if(scenario, target) if scale is None else _one(scenario, out), out)
    except BAD_INPUT as e:
        fail(_named(e))


def _look_at(out: Path) -> None:
    """Before a long run: could its folder be made? Nothing is left where the run is refused."""
    there = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ScenarioError(f"--out {out}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ScenarioError(f"--out {out}: no right to write in {there}")


def _named(error: Exception) -> str:
    """What is wrong, by the option that was given instead of the scenario's field."""
    if not isinstance(error, ScenarioError) or error.field not in OPTION_OF:
        return str(error)
    return f"{OPTION_OF[error.field]}: {error.wanted}"


def _says_everything(context: typer.Context) -> None:
    """A saved scenario is repeated as it is: no option may seem to change it."""
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name is not None
        and parameter.name not in BESIDE_A_FILE
        and getattr(context.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise ScenarioError(
            f"--scenario FILE holds everything itself: leave out {', '.join(given)}, "
            "or change a copy of the file"
        )


def _options(text: str) -> dict[str, Any]:
    """Of --policy-options. Raises ScenarioError; whether the policy knows them it says itself."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as e:
        raise ScenarioError(f"--policy-options {text!r}: not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ScenarioError(
            f"--policy-options {text!r}: names and values in braces expected, "
            'such as {"on_overload": "shed"}'
        )
    return found


def _show(result: dict[str, Any], out: Path | None) -> None:
    """Printed first: what was simulated is not lost where it cannot be saved."""
    shown = {k: v for k, v in result.items() if k not in ("by_time", "scenario")}
    print(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode(), flush=True)
    if out is not None:
        save = report.save_what_if if result.get("what_if") else report.save
        try:
            tell(f"saved: {save(result, out)}")
        except OSError as e:
            fail(f"--out {out}: cannot be written: {e.strerror}")


def _what_if(scenario: Scenario, target: float) -> dict[str, Any]:
    work = scenario.workload
    if work.limit is None and work.duration is None:
        limited = msgspec.structs.replace(work, limit=WHAT_IF_REQUESTS)
        scenario = msgspec.structs.replace(scenario, workload=limited)
    return what_if.answer(scenario, target=target, say=tell)


def _one(scenario: Scenario, out: Path | None) -> dict[str, Any]:
    if out is not None:
        report.need_plots()
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        work = scenario.workload
        task = progress.add_task("", total=work.limit or work.duration)

        def watch(world: World) -> None:
            done = world.recorder.total
            progress.update(
                task,
                completed=done.offered if work.limit else world.kernel.now,
                description=f"{world.kernel.now / 3600:.2f} h, {done.completed} answered",
            )

        return run(scenario, watch)
