"""The simulator against real replicas: a profile measured in one run predicts the others.

Replicas are real, of one thread each, and serve the shortened traces; the profile is fitted to
the steps of a first run that is compared with nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench import measured
from bench.stack import running
from bench.validity import compared, replayed, simulated
from services.replica.settings import ReplicaSettings
from shared.profile import Profile
from sim.replica import Batching

SHORTENED = ("--prompt-scale", "0.05", "--output-scale", "0.25", "--max-output", "64")
B_MAX, KV_TOKENS = 16, 32768
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "COLLM_REPLICA_THREADS": "1",
    "COLLM_REPLICA_B_MAX": str(B_MAX),
    "COLLM_REPLICA_KV_TOKENS": str(KV_TOKENS),
    # The simulator knows of no common beginnings; the chat template's are a third of such prompts.
    "COLLM_REPLICA_PREFIX_CACHE": "false",
}
CALIBRATES = "least_loaded"


def validity(o: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One entry a policy and load; ``o`` are the options of ``bench.sim``. Raises TooFew."""
    wanted = argparse.Namespace(**{**vars(o), "slo": o.cpu_slo, "replicas": o.cpu_replicas})
    _, profile = real_run(CALIBRATES, max(o.cpu_loads), wanted)
    wanted.profile = measured.write(profile, folder)
    wanted.batching = Batching(step_seconds=ReplicaSettings.model_fields["step_seconds"].default)
    print(f"measured: {profile.coefficients}, jitter {profile.jitter}", file=sys.stderr, flush=True)
    found = []
    for load in o.cpu_loads:
        for policy in o.policies:
            real, then = real_run(policy, load, wanted)
            entry = {
                **compared(real, simulated(real, policy, wanted), policy, load),
                "own_profile": own_speed(real, policy, load, wanted, then),
                "cluster": f"{o.cpu_replicas} CPU replicas",
                "void": real["client_behind"],
            }
            print(entry, file=sys.stderr, flush=True)
            found.append(entry)
    return found


def own_speed(
    real: dict[str, Any], policy: str, load: float, o: argparse.Namespace, then: Profile
) -> dict[str, Any]:
    """Errors with the speed that the machine had in that very run.

    A shared machine is a third faster or slower from minute to minute; this tells the simulator's
    own error from that.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = measured.write(then, Path(folder))
        same = argparse.Namespace(**{**vars(o), "profile": path})
        entry = compared(real, simulated(real, policy, same), policy, load)
    return {key: value for key, value in entry.items() if key.endswith("_error")} | {
        "coefficients": msgspec.to_builtins(then.coefficients)
    }


def real_run(policy: str, load: float, o: argparse.Namespace) -> tuple[dict[str, Any], Profile]:
    """The load generator's result, and the profile that this run's steps make."""
    up = ["--model", o.model, "--replicas", str(o.replicas), "--no-train", "--policy", policy]
    with running(up, ENVIRONMENT) as stack:
        result = replayed(stack, load, o, *SHORTENED)
        steps = asyncio.run(measured.steps(stack.redis))
    return result, measured.profile_of(steps, "measured", B_MAX, KV_TOKENS)
