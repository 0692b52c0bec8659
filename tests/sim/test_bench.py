"""The validity bench's own arithmetic."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import msgspec
import pytest

from bench import measured, policies
from bench.validity import error, slowed, slowed_slo
from services.replica.settings import ReplicaSettings
from shared import profile, slo
from shared.messages import Finished, StepSample
from sim.replica import Batching


def test_a_slowed_profile_takes_as_many_times_as_long(tmp_path: Path) -> None:
    known = profile.load("h20-8b")
    slow = profile.load(slowed("h20-8b", 10.0, tmp_path))
    once, tenfold = (
        known.coefficients.service(4, 1, 100, 20),
        slow.coefficients.service(4, 1, 100, 20),
    )
    assert tenfold == pytest.approx(10 * once)
    assert slow.b_max == known.b_max
    assert "slowed 10 times" in slow.source


def test_limits_are_slowed_alike_and_keep_their_tags() -> None:
    limits = slo.parse(slowed_slo(["ttft:100", "code/e2e:0.5s"], 10.0))
    assert limits[""].ttft_ms == 1000
    assert limits["code"].e2e_ms == 5000


def test_errors_are_relative_except_for_shares() -> None:
    real = {"p50_e2el_ms": 200.0, "slo_attainment": 0.8, "p99_e2el_ms": None}
    sim = {"p50_e2el_ms": 190.0, "slo_attainment": 0.9, "p99_e2el_ms": 1.0}
    assert error(real, sim, "p50_e2el_ms") == -0.05
    assert error(real, sim, "slo_attainment") == 0.1
    assert error(real, sim, "p99_e2el_ms") is None


def test_goodputs_are_compared_over_the_same_seconds() -> None:
    real = {"goodput_tokens_per_s": 10.0, "active_goodput_tokens_per_s": 20.0}
    assert error(real, {"goodput_tokens_per_s": 22.0}, "goodput_tokens_per_s") == 0.1


def step(time: float, seconds: float, b: int, prompt: int = 0) -> StepSample:
    return StepSample(
        replica=f"r{b % 2}", model="m", incarnation="i", seq=0, time=time, seconds=seconds, b=b,
        prefill_tokens=prompt, decode_tokens=b,
    )  # fmt: skip


def test_a_profile_is_measured_from_steps() -> None:
    """Decode: 2 ms a request and 30 ms; a prompt token: 1 ms more."""
    rng = random.Random(1)
    samples = [step(float(t), (0.002 * b + 0.03) * rng.uniform(0.95, 1.05), b)
               for t, b in enumerate([1, 2, 4, 8, 16] * 40)]  # fmt: skip
    samples += [step(200.0 + n, 0.002 * 4 + 0.03 + 0.001 * n, 4, n) for n in (50, 100, 400)]
    found = measured.profile_of(samples, "here", 16, 1000)
    assert found.coefficients.alpha1 == pytest.approx(0.002, rel=0.1)
    assert found.coefficients.alpha0 == pytest.approx(0.03, rel=0.1)
    assert found.coefficients.pi1 == pytest.approx(0.001, rel=0.1)
    assert 0.01 < found.jitter < 0.05
    assert (found.b_max, found.kv_tokens) == (16, 1000)


def test_time_between_two_steps_counts_where_work_went_on() -> None:
    ended = Finished(id="q", reason="stop", prompt_tokens=1, output_tokens=1, attempt=1)
    done = msgspec.structs.replace(step(3.0, 0.1, 1), finished=(ended,))
    made = [
        step(1.0, 0.10, 1),
        step(1.25, 0.05, 2),  # another replica: nothing before it
        step(1.15, 0.10, 1),  # began 50 ms after the first one's end
        step(1.25, 0.10, 1),  # at once
        step(2.00, 0.10, 1),  # after a pause
        done,
        step(3.15, 0.10, 1),  # the one before had ended: this is an arrival
    ]
    seconds = [round(s.seconds, 3) for s in measured.whole(made)]
    assert seconds == [0.1, 0.05, 0.15, 0.1, 0.1, 0.1, 0.1]


def test_a_measured_profile_is_read_as_any_other(tmp_path: Path) -> None:
    made = measured.profile_of([step(1.0, 0.04, 4), step(2.0, 0.05, 8)], "here", 16, 1000)
    assert profile.load(measured.write(made, tmp_path)) == made


@pytest.mark.parametrize("samples", [[], [step(1.0, 0.04, 4), step(2.0, 0.04, 4)]])
def test_steps_of_one_size_make_no_profile(samples: list[StepSample]) -> None:
    with pytest.raises(measured.TooFew, match="no latency model"):
        measured.profile_of(samples, "here", 16, 1000)


@pytest.mark.parametrize(
    ("policy", "batching", "lora"),
    [
        ("peft", "static", "unmerged"),
        ("dlora", "continuous", "dynamic"),
        ("collm", "continuous", "unmerged"),
    ],
)
def test_emulated_replicas_batch_as_the_baselines_own_engines_do(
    policy: str, batching: str, lora: str
) -> None:
    run = policies.Run(policy=policy, trace="code", load=1.0, seed=0, shed=False)
    emulated = policies.Bench(argparse.Namespace(prompts=[]), policies.EMULATED)
    found = emulated.environment(run)
    assert (found["COLLM_REPLICA_BATCHING"], found["COLLM_REPLICA_LORA"]) == (batching, lora)
    settings = {"batching": batching, "lora": lora}
    assert ReplicaSettings(engine="emulated", **settings).lora == lora
    assert msgspec.convert(settings, Batching) == policies.BATCHING.get(policy, Batching())
    real = policies.Bench(argparse.Namespace(prompts=[]), policies.cpu_cluster("m", 2, 1000.0))
    assert not {"COLLM_REPLICA_BATCHING", "COLLM_REPLICA_LORA"} & real.environment(run).keys()
