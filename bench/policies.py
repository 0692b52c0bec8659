"""Every dispatch policy in the same cluster of real services, on the Azure traces.

``python -m bench.policies --data FOLDER`` with the 2023 code and conversation CSVs. Clusters:
``emulated16`` (16 emulated replicas in real time, 8B model on a pair of H20, published figures)
and ``cpu`` (real replicas, one thread each). Load 4x is 1.1 times the rate at which round robin's
attainment falls under 90 % of an idle cluster's; 1x a quarter of it. Runs are interleaved: every
policy once before any goes again. Prints progress on stderr and one JSON line on stdout.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import azure, origin, validity
from bench.policies_report import Run, draw, ratios, row, spread
from bench.progress import Progress
from bench.stack import StackError, running
from collm import models
from sim.replica import Batching

POLICIES = ("round_robin", "least_loaded", "peft", "shepherd", "dlora", "split", "collm")
# How the replicas of a baseline batch where they are emulated: as its authors' engine does.
BATCHING = {"peft": Batching(batching="static"), "dlora": Batching(lora="dynamic")}
SATURATED = 0.9  # of an idle cluster's attainment
PROBES_MAX = 8


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """How a cluster is started, and what a trace looks like on it."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    slos: dict[str, tuple[str, ...]]  # trace -> limits
    scales: tuple[str, ...] = ()  # of lengths, for the load generator
    first_scale: float = 0.25  # rate scale at which the search for saturation begins


EMULATED = Cluster(
    name="emulated16",
    arguments=("--engine", "emulated", "--profile", "h20-8b", "--replicas", "16", "--no-train"),
    environment={"COLLM_REPLICA_B_MAX": "256", "COLLM_REPLICA_KV_TOKENS": "1183578"},
    slos={"code": ("e2el:500",), "conv": ("ttft:1000", "tpot:50")},
    first_scale=1.0,
)


def tokenizer(model: str = models.DEFAULT_NAME) -> Path:
    """Folder with the tokenizer by which prompts get the trace's lengths exactly."""
    return models.resolve(model).path


def slowed(cluster: Cluster, factor: float) -> Cluster:
    """The emulated cluster in slow motion."""
    if factor == 1.0:
        return cluster
    slos = {trace: tuple(_times(limit, factor) for limit in v) for trace, v in cluster.slos.items()}
    scale = {"COLLM_REPLICA_TIME_SCALE": f"{1 / factor:g}"}
    return msgspec.structs.replace(
        cluster,
        slos=slos,
        environment=cluster.environment | scale,
        first_scale=cluster.first_scale / factor,
    )


def _times(limit: str, factor: float) -> str:
    name, _, milliseconds = limit.partition(":")
    return f"{name}:{float(milliseconds) * factor:g}"


def cpu_cluster(model: str, replicas: int, limit_ms: float) -> Cluster:
    """Real replicas; prompts and answers shortened so that the machine carries them."""
    return Cluster(
        name="cpu",
        arguments=("--model", model, "--replicas", str(replicas), "--no-train"),
        # Its kernels' threads as well: by default a replica takes all that the host has.
        environment={"OMP_NUM_THREADS": "1", "COLLM_REPLICA_THREADS": "1"},
        slos={trace: (f"e2el:{limit_ms:.0f}",) for trace in ("code", "conv")},
        scales=("--prompt-scale", "0.05", "--output-scale", "0.25", "--max-output", "64"),
    )


class Bench:
    """Starts the cluster anew for each run, so that no run inherits from another."""

    def __init__(self, options: argparse.Namespace, cluster: Cluster) -> None:
        self._o, self._cluster = options, cluster
        self.emulated = cluster.name.startswith("emulated")
        self.scored = bool(options.prompts) and not self.emulated

    def saturation(self, trace: str) -> float:
        """Rate scale at which round robin saturates: doubling, then two halvings."""
        scale = self._cluster.first_scale
        say(f"{self._cluster.name}/{trace}: at most {PROBES_MAX + 1} probes find saturation")
        idle = self._probe(trace, scale)
        low, high = scale, 0.0
        for _ in range(PROBES_MAX):
            scale = (low + high) / 2 if high else low * 2
            if self._probe(trace, scale) < SATURATED * idle:
                high = scale
            else:
                low = scale
            if high and high / low < 1.3:
                break
        return high or low

    def _probe(self, trace: str, scale: float) -> float:
        run = Run(policy="round_robin", trace=trace, load=0.0, seed=0, shed=False)
        attainment = float(self.go(run, scale, self._o.probe_seconds)["slo_attainment"] or 0.0)
        say(f"{self._cluster.name}/{trace} round_robin at scale {scale:.3g}: {attainment:.3f}")
        return attainment

    def environment(self, run: Run) -> dict[str, str]:
        """Settings of the cluster for this run."""
        environment = dict(self._cluster.environment)
        if run.shed:
            environment["COLLM_DISPATCHER_POLICY_OPTIONS"] = '{"on_overload": "shed"}'
        if self.emulated:
            batching = BATCHING.get(run.policy, Batching())
            environment["COLLM_REPLICA_BATCHING"] = batching.batching
            environment["COLLM_REPLICA_LORA"] = batching.lora
        return environment

    def go(self, run: Run, scale: float, seconds: float) -> dict[str, Any]:
        """Start, replay, stop; the load generator's result."""
        arguments = [*self._cluster.arguments, "--policy", run.policy]
        with (
            running(arguments, self.environment(run)) as stack,
            tempfile.TemporaryDirectory() as folder,
        ):
            command = [sys.executable, "-m", "loadgen", "--base-url", stack.url]
            command += ["--trace", f"{run.trace}={self._o.files[run.trace]}"]
            command += ["--rate-scale", f"{scale:.5g}", "--duration", f"{seconds:g}"]
            command += ["--seed", str(run.seed), "--ignore-eos", "--slo-headers", "--no-progress"]
            command += ["--goodput", *self._cluster.slos[run.trace], *self._cluster.scales]
            command += ["--tokenizer", str(tokenizer(self._o.model))]
            if self.scored:
                for path in self._o.prompts:
                    command += ["--prompts", str(path), "--split", "all"]
            command += ["--save-detailed", "--result-dir", folder, "--result-filename", "run.json"]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            lag = stack.step_lag() if self.emulated else None
            if done.returncode:
                raise StackError(f"the load generator failed: {done.stderr[-2000:]}")
            saved = Path(folder) / "run.json"
            if self.scored:
                self._score(saved, stack.data_dir)
            result: dict[str, Any] = json.loads(saved.read_text())
        return result | {"step_lag_p99": lag}

    def _score(self, result: Path, data_dir: Path) -> None:
        """Fill ``q_goodput``: the references' cross-entropy under the versions that answered."""
        command = [sys.executable, "-m", "collm.cli", "score", str(result), "--json"]
        command += ["--model", self._o.model, "--data-dir", str(data_dir)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise StackError(f"scoring failed: {done.stderr[-2000:]}")

    def errors(self, run: Run, result: dict[str, Any]) -> dict[str, Any] | None:
        """The same requests through the simulator against this run of emulated replicas."""
        if not self.emulated or run.shed:
            return None
        batching = BATCHING.get(run.policy, Batching())
        with tempfile.TemporaryDirectory() as folder:
            options = argparse.Namespace(
                slo=[f"{run.trace}/{x}" for x in self._cluster.slos[run.trace]],
                replicas=16,
                profile=validity.slowed("h20-8b", self._o.slow, Path(folder)),
                batching=batching,
            )
            sim = validity.simulated(result, run.policy, options)
        return validity.compared(result, sim, run.policy, run.load)


def plan(o: argparse.Namespace) -> list[Run]:
    """Interleaved: seed by seed, load by load, all policies one after the other."""
    runs = []
    for seed, load, trace in itertools.product(range(o.seeds), o.loads, o.traces):
        for policy, shed in itertools.product(o.policies, (False, True)):
            if shed and (not o.with_shedding or policy not in ("collm", "shepherd")):
                continue
            runs.append(Run(policy=policy, trace=trace, load=load, seed=seed, shed=shed))
    return runs


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m bench.policies", description=__doc__)
    p.add_argument("--data", type=Path, metavar="FOLDER", help=azure.SOURCE)
    p.add_argument("--clusters", nargs="+", default=["emulated16", "cpu"])
    p.add_argument("--policies", nargs="+", default=list(POLICIES))
    p.add_argument("--traces", nargs="+", default=["code", "conv"])
    p.add_argument("--loads", nargs="+", type=float, default=[1.0, 4.0])
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--seconds", type=float, default=60.0, help="of arrivals in each run")
    p.add_argument("--probe-seconds", type=float, default=30.0)
    p.add_argument("--scale-at-4x", type=float, help="skip the search: rate scale of load 4x")
    p.add_argument("--with-shedding", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument(
        "--slow",
        type=float,
        default=1.0,
        help="emulated replicas in slow motion, limits and gaps stretched alike: for a machine "
        "that cannot carry them in real time",
    )
    p.add_argument("--full", action="store_true", help="loads 1 to 4, five seeds")
    p.add_argument("--model", default="SmolLM2-135M-Instruct", help="of the cpu cluster")
    p.add_argument(
        "--prompts",
        type=Path,
        action="append",
        default=[],
        metavar="JSONL",
        help="chats with reference answers for the cpu cluster: gives q_goodput",
    )
    p.add_argument(
        "--out", type=Path, default=origin.ROOT / "data" / "bench", help="folder of the figures"
    )
    p.add_argument("--cpu-replicas", type=int, default=2)
    p.add_argument("--cpu-limit-ms", type=float, default=5000.0)
    o = p.parse_args(arguments)
    if o.full:
        o.loads, o.seeds = [1.0, 2.0, 3.0, 4.0], 5
    if o.data is None:
        p.exit(2, f"bench.policies needs traces: {azure.ADD}\n")
    try:
        o.files = azure.traces(o.data, o.traces)
    except azure.NoTraces as e:
        p.exit(2, f"bench.policies: {e}\n")
    return o


def main() -> None:
    o = options()
    known = {
        "emulated16": slowed(EMULATED, o.slow),
        "cpu": cpu_cluster(o.model, o.cpu_replicas, o.cpu_limit_ms),
    }
    rows: list[dict[str, Any]] = []
    at_four: dict[str, float] = {}
    progress = Progress([1.0] * len(plan(o)) * len(o.clusters))
    for name in o.clusters:
        bench = Bench(o, known[name])
        for trace in o.traces:
            found = o.scale_at_4x or 1.1 * bench.saturation(trace)
            at_four[f"{name}/{trace}"] = round(found, 4)
        for run in plan(o):
            started = time.monotonic()
            scale = at_four[f"{name}/{run.trace}"] * run.load / 4.0
            result = bench.go(run, scale, o.seconds)
            rows.append(row(name, run, result) | {"against_simulated": bench.errors(run, result)})
            progress.took(time.monotonic() - started)
            say(f"{rows[-1]} ({time.monotonic() - started:.0f} s)\n{progress}")
    print(
        json.dumps(
            {
                "bench": "policies",
                "runs": rows,
                "spread": spread(rows),
                "best_baseline_ratio": ratios(rows),
                "best_baseline_ratio_to_the_last_answer": ratios(
                    rows, "goodput_to_the_last_answer"
                ),
                "rate_scale_at_4x": at_four,
                "slos": {name: known[name].slos for name in o.clusters},
                "seconds": o.seconds,
                "slow_motion": o.slow,
                "figures": draw(rows, o.out),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
