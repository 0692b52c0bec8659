"""The simulator against real runs: the same requests, the same policy, relative errors.

The same requests go (a) through the whole real system with emulated replicas in real time and (b)
through the simulator with the same policy and profile. Arrivals and lengths of (b) are those that
(a) really had. ``cpu_validity`` does it with real replicas.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from bench.stack import Stack, running
from collm import models
from shared import profile, slo
from sim.replica import Batching
from sim.scenario import Scenario, run
from sim.workload import Workload

EPOCH = 1_700_000_000.0
VOID_ABOVE = 0.05  # step lag p99 of an emulated replica beyond which its run says nothing


def slowed(name: str, factor: float, folder: Path) -> str:
    """A profile whose every duration is ``factor`` times as long, as a file.

    Real time is the limit of an emulated run: steps of some ms are lost in a small machine's
    scheduling. Slowed, the same cluster is emulated faithfully. The limits have to be slowed with
    it (``slowed_slo``); the rate is not: it is what ``--loads`` says.
    """
    known = profile.load(name)
    values = msgspec.to_builtins(known)
    values["coefficients"] = {k: v * factor for k, v in values["coefficients"].items()}
    for key in ("load_seconds", "adapter_seconds", "merge_seconds"):
        values[key] *= factor
    values["source"] = f"{known.source}; slowed {factor:g} times for a run in real time"
    path = folder / "slowed.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def slowed_slo(parts: Sequence[str], factor: float) -> list[str]:
    """The same limits, ``factor`` times as long (ms)."""
    found = []
    for tag, limits in slo.parse(parts).items():
        pairs = (("ttft", limits.ttft_ms), ("tpot", limits.tpot_ms), ("e2e", limits.e2e_ms))
        prefix = f"{tag}/" if tag else ""
        found += [f"{prefix}{name}:{ms * factor:g}" for name, ms in pairs if ms is not None]
    return found


def real_run(policy: str, load: float, o: argparse.Namespace) -> dict[str, Any]:
    """The trace through the running system with emulated replicas; the detailed result."""
    up = ["--model", o.model, "--replicas", str(o.replicas), "--no-train", "--policy", policy]
    up += ["--engine", "emulated", "--profile", o.profile]
    with running(up) as stack:
        result = replayed(stack, load, o)
        result["step_lag_p99"] = stack.step_lag()
    return result


def replayed(stack: Stack, load: float, o: argparse.Namespace, *more: str) -> dict[str, Any]:
    """The load generator's detailed result. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "loadgen", "--base-url", stack.url, "--ignore-eos"]
        for path in o.trace:
            command += ["--trace", path]
        command += ["--trace-align", "start", "--rate-scale", str(load)]
        command += ["--duration", str(o.seconds), "--no-progress"]
        command += ["--max-prompt", "7000", "--goodput", *o.slo, "--slo-headers"]
        command += ["--save-detailed", "--result-dir", folder, "--result-filename", "run.json"]
        command += ["--tokenizer", str(models.resolve(o.model).path), *more]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the load generator failed:\n{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads((Path(folder) / "run.json").read_text())
    return result


def simulated(real: Mapping[str, Any], policy: str, o: argparse.Namespace) -> dict[str, Any]:
    """The requests of a real run through the simulator.

    As in that run (no coordinator) the policy fits its latencies from what replicas report.
    """
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    lines: dict[str, list[str]] = {}
    for request in real["requests"]:
        moment = datetime.fromtimestamp(EPOCH + request["sent"], UTC)
        tokens = request["input_tokens"] or request["asked_prompt"]
        stamp = moment.strftime("%Y-%m-%d %H:%M:%S.%f+00:00")
        rows = lines.setdefault(request["tag"] or "all", [head])
        rows.append(f"{stamp},{tokens},{request['asked_output']}")
    with tempfile.TemporaryDirectory() as folder:
        traces = []
        for tag, rows in lines.items():
            path = Path(folder) / f"{tag}.csv"
            path.write_text("\n".join(rows) + "\n", encoding="utf-8")
            traces.append((tag, path))
        work = Workload(traces=tuple(traces), slos=slo.parse(o.slo))
        return run(
            Scenario(
                profile=o.profile,
                replicas=o.replicas,
                policy=policy,
                workload=work,
                batching=getattr(o, "batching", Batching()),
                learn=True,
            )
        )


GOODPUT = "goodput_tokens_per_s"


def error(real: Mapping[str, Any], sim: Mapping[str, Any], key: str) -> float | None:
    """(simulated - real) / real; attainment as a plain difference of shares.

    The simulator's goodput counts the seconds to the last arrival or answer in time.
    """
    a, b = real[f"active_{key}" if key == GOODPUT else key], sim[key]
    if a is None or b is None or not a:
        return None
    return round(float(b - a if key == "slo_attainment" else (b - a) / a), 4)


def compared(
    real: Mapping[str, Any], sim: Mapping[str, Any], policy: str, load: float
) -> dict[str, Any]:
    """Errors of a simulation against the run whose requests it had."""
    return {
        "policy": policy,
        "load": load,
        "goodput_error": error(real, sim, GOODPUT),
        "attainment_error": error(real, sim, "slo_attainment"),
        "e2e_p50_error": error(real, sim, "p50_e2el_ms"),
        "e2e_p99_error": error(real, sim, "p99_e2el_ms"),
        "ttft_p99_error": error(real, sim, "p99_ttft_ms"),
        "real": {
            k: real[k]
            for k in (f"active_{GOODPUT}", "slo_attainment", "p50_e2el_ms", "p99_e2el_ms")
        },
        "client_lag_p99_ms": real["client_lag_p99_ms"],
        "requests": real["offered"],
    }


def validity(o: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry a policy and load."""
    found = []
    for load in o.loads:
        for policy in o.policies:
            real = real_run(policy, load, o)
            sim = simulated(real, policy, o)
            entry = {
                **compared(real, sim, policy, load),
                "cluster": f"{o.replicas} x {Path(o.profile).stem}, emulated in real time",
                "step_lag_p99": real["step_lag_p99"],
                "void": (real["step_lag_p99"] or 0.0) > VOID_ABOVE or real["client_behind"],
            }
            print(entry, file=sys.stderr, flush=True)
            found.append(entry)
    return found
