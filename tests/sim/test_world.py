"""Conservation in whole simulations: every request ends once, work in = work out."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.dispatcher.policies.registry import POLICIES
from services.launcher.terms import Options
from shared.slo import Slo
from sim import report, what_if
from sim.replica import Batching
from sim.rounds import Federated
from sim.scenario import Scenario, ScenarioError, build, load_curve, run
from sim.workload import AZURE_LIKE, Workload, jobs, planned

PROFILE = """
name: small
source: test
coefficients: {alpha0: 0.01, alpha1: 0.0005, alpha2: 0.001, pi0: 0.002, pi1: 0.00005,
  gamma0: 0.05, gamma1: 0.02, gamma2: 0.001}
b_max: 8
kv_tokens: 6000
context: 4096
"""
QUICK = Options(t0=5, t_min=3, t_max=10, t_back0=10)


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "small.yaml"
    path.write_text(PROFILE)
    return str(path)


def scenario(profile_file: str, **changes: object) -> Scenario:
    work = Workload(
        rate=20.0, burstiness=0.5, prompt_tokens=200, output_tokens=20, limit=400,
        slos={"": Slo(e2e_ms=2000)},
    )  # fmt: skip
    values = {"profile": profile_file, "replicas": 3, "policy": "least_loaded", "workload": work}
    return Scenario(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("training", [False, True])
def test_every_request_ends_exactly_once(profile_file: str, policy: str, training: bool) -> None:
    federated = Federated(launcher=QUICK, local_steps=2) if training else None
    result = run(scenario(profile_file, policy=policy, federated=federated))
    assert (result["completed"], result["failed"], result["shed"]) == (400, 0, 0)
    assert result["offered"] == 400
    assert result["total_output_tokens"] == 20 * result["completed"]
    assert result["total_input_tokens"] == 200 * result["completed"]
    assert 0 < result["utilisation"] <= 1
    assert all(0 <= v <= 1 for row in result["by_time"]["utilisation"] for v in row)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rate=st.floats(0.5, 200),
    burstiness=st.floats(0.2, 3),
    replicas=st.integers(1, 5),
    output=st.integers(1, 80),
    prompt=st.integers(1, 4000),
    static=st.booleans(),
    training=st.booleans(),
    policy=st.sampled_from(sorted(POLICIES)),
    limit_ms=st.sampled_from([None, 500, 5000]),
    seed=st.integers(0, 1000),
)
def test_work_in_is_work_out_under_any_load(
    profile_file: str, rate: float, burstiness: float, replicas: int, output: int, prompt: int,
    static: bool, training: bool, policy: str, limit_ms: int | None, seed: int,
) -> None:  # fmt: skip
    work = Workload(
        rate=rate, burstiness=burstiness, prompt_tokens=prompt, output_tokens=output, limit=150,
        slos={"": Slo(e2e_ms=limit_ms)}, seed=seed,
    )  # fmt: skip
    one = scenario(
        profile_file, workload=work, replicas=replicas, policy=policy, seed=seed,
        batching=Batching(batching="static" if static else "continuous"),
        federated=Federated(launcher=QUICK, local_steps=1) if training else None,
    )  # fmt: skip
    world = build(one)
    world.run()
    total = world.recorder.total
    assert total.completed + total.unfinished + total.shed == total.offered == 150
    assert not world.jobs
    assert total.tokens == output * total.completed
    for replica in world.replicas.values():
        assert replica.busy <= world.kernel.now + 1e-6
        assert replica.kv_used == 0
        assert not replica.waiting
    fits = prompt + output <= 4096
    assert total.completed == (150 if fits else 0)


def test_the_seed_fixes_the_outcome(profile_file: str) -> None:
    first, second = (run(scenario(profile_file)) for _ in range(2))
    for result in (first, second):
        result.pop("cpu_seconds")
        for key in ("decision_share", "decision_ms"):  # of the processor
            result["overhead"].pop(key)
    assert first == second


def test_training_raises_quality_and_yielding_keeps_the_slo(profile_file: str) -> None:
    light = Workload(
        rate=2.0, prompt_tokens=200, output_tokens=20, duration=400.0, slos={"": Slo(e2e_ms=600)}
    )
    federated = Federated(launcher=QUICK, local_steps=5)
    trained = run(scenario(profile_file, workload=light, federated=federated))
    plain = run(scenario(profile_file, workload=light))
    assert trained["training"]["rounds"] > 0
    assert trained["training"]["compute_share"] > 0
    assert trained["q_goodput"] > plain["q_goodput"]
    assert trained["slo_attainment"] >= plain["slo_attainment"] - 0.05
    losses = [ce for _, ce in trained["training"]["cross_entropy"]]
    assert losses == sorted(losses, reverse=True)


def test_dedicated_replicas_train_and_their_version_is_served_at_the_end(profile_file: str) -> None:
    work = Workload(rate=3.0, prompt_tokens=100, output_tokens=10, duration=200.0)
    federated = Federated(
        launcher=QUICK, dedicated=2, publish_at_end=True, local_steps=2, max_rounds=3
    )
    options = {"serving": 1}
    result = run(
        scenario(
            profile_file, policy="split", policy_options=options, workload=work, federated=federated
        )
    )
    assert result["completed"] == result["offered"]
    rows = result["by_time"]["utilisation"]
    assert any(rows[0])
    assert not any(rows[1])
    assert not any(rows[2])
    assert result["training"]["rounds"] > 3


def test_no_training_happens_with_training_off(profile_file: str) -> None:
    federated = Federated(launcher=QUICK, training_off=True)
    result = run(scenario(profile_file, federated=federated))
    assert result["training"]["samples"] == 0


def test_a_request_longer_than_the_context_fails_alone(profile_file: str) -> None:
    work = Workload(rate=5.0, prompt_tokens=5000, output_tokens=5, limit=3)
    result = run(scenario(profile_file, workload=work))
    assert (result["failed"], result["completed"]) == (3, 0)


def test_memory_of_the_recorder_does_not_grow_with_the_run(profile_file: str) -> None:
    work = Workload(rate=30.0, prompt_tokens=50, output_tokens=5, limit=3000)
    world = build(scenario(profile_file, workload=work))
    before = {row: len(values) for row, values in world.recorder.series.rows.items()}
    world.run()
    assert {row: len(values) for row, values in world.recorder.series.rows.items()} == before
    assert sum(world.recorder.series.values("completed")) == 3000


def test_the_what_if_finds_the_edge(profile_file: str) -> None:
    work = Workload(
        rate=4.0, prompt_tokens=200, output_tokens=40, limit=300, slos={"": Slo(e2e_ms=1500)}
    )
    found = what_if.answer(scenario(profile_file, workload=work))
    scale = found["largest_scale"]
    beyond = run(what_if.at_scale(scenario(profile_file, workload=work), scale * 1.3))
    assert found["slo_attainment"] >= 0.9 * found["unloaded_attainment"]
    assert beyond["slo_attainment"] < 0.9 * found["unloaded_attainment"]
    assert found["training_samples_per_s"]["at_scale_1"] >= 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_run_ends_where_its_last_request_fits_no_replica(
    profile_file: str, tmp_path: Path, policy: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01,10,5\n"
        "2024-05-10 00:00:09,99999999999999999999,5\n"
    )
    for federated in (None, Federated(launcher=QUICK)):
        work = Workload(traces=(("t", path),), slos={"": Slo(e2e_ms=2000)})
        world = build(scenario(profile_file, policy=policy, workload=work, federated=federated))
        world.kernel.run(world, 100_000)
        assert world.kernel.stopped or not len(world.kernel)
        assert (world.recorder.total.completed, world.recorder.total.unfinished) == (1, 1)


def test_a_what_if_without_slo_is_refused(profile_file: str) -> None:
    work = Workload(rate=4.0, limit=10)
    with pytest.raises(ScenarioError, match="--slo"):
        what_if.answer(scenario(profile_file, workload=work))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": 0}, "at least 1"),
        ({"workload": Workload()}, "one of: traces"),
        ({"workload": Workload(rate=1.0)}, "never ends"),
        ({"curve": "absent"}, "known: "),
        ({"replicas": 1_000_000_000}, "at most 100,000 expected"),
        (
            {"workload": Workload(rate=1.0, limit=1, slos={"code": Slo(e2e_ms=9)})},
            "workload.slos: no request has the tag 'code'; at a rate none has one",
        ),
        (
            {"workload": Workload(streams=AZURE_LIKE, limit=1, slos={"cod": Slo(e2e_ms=9)})},
            "no request has the tag 'cod'; those of this workload: code, conv",
        ),
    ],
)
def test_a_senseless_scenario_is_refused(
    profile_file: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ScenarioError, match=message):
        build(scenario(profile_file, **changes))


def test_a_repeated_trace_goes_on_with_a_daily_rhythm(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = [f"2024-05-10 00:00:{k:02}.000000+00:00,10,5\n" for k in range(60)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    work = Workload(traces=(("t", path),), repeat=True, duration=1000.0, diurnal=0.8, day=1000.0)
    dues = [p.due for p in planned(work)]
    assert dues == sorted(dues)
    night = sum(1 for due in dues if due < 250 or due > 750)
    noon = sum(1 for due in dues if 250 <= due <= 750)
    assert noon > 2 * night


def test_deadlines_come_from_the_slo_of_the_tag(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01.000000+00:00,10,5\n"
    )
    work = Workload(
        traces=(("code", path), ("conv", path)),
        slos={"code": Slo(e2e_ms=500), "": Slo(ttft_ms=100)},
    )
    code, conv = jobs(work)
    assert (code.request.deadline, code.request.ttft_deadline) == (0.5, None)
    assert (conv.request.deadline, conv.request.ttft_deadline) == (None, 0.1)


def test_the_report_is_one_page_that_needs_nothing_else(profile_file: str, tmp_path: Path) -> None:
    result = run(scenario(profile_file, federated=Federated(launcher=QUICK, local_steps=1)))
    page = report.save(result, tmp_path / "out").read_text()
    assert "<img" in page
    assert "http" not in page.replace("data:image", "")
    assert (tmp_path / "out" / "result.json").exists()
    assert "Virtual time" in page
    assert "untagged" not in page, "the same column twice"
    for number in ("1234567.8", "23380.4"):
        assert f"{float(number):,.0f}" in report.render({**result, "p99_ttft_ms": float(number)})


@pytest.mark.parametrize(
    ("seconds", "unit"), [(0.5, "seconds"), (119, "seconds"), (120, "minutes"), (7200, "hours")]
)
def test_a_page_tells_time_in_what_fits_the_run(seconds: float, unit: str) -> None:
    assert report._unit(seconds)[0] == unit


def test_a_loss_curve_falls_from_start_to_floor() -> None:
    curve = load_curve("assumed")
    assert curve.cross_entropy(0) == curve.start
    assert curve.floor < curve.cross_entropy(1e6) < curve.cross_entropy(1e3) < curve.start


def test_a_sample_brings_less_in_a_larger_batch_than_the_curve_was_fitted_with() -> None:
    curve = msgspec.structs.replace(load_curve("assumed"), batch=4.0)
    assert curve.worth(4, 16.0) == 1.0
    assert curve.worth(32, 16.0) == pytest.approx(20 / 48)
    assert curve.worth(2, 16.0) > 1.0
    assert curve.worth(32, 1e9) == pytest.approx(1.0), "all noise: every sample counts"


def test_random_streams_keep_their_rates_and_medians() -> None:
    plan = list(planned(Workload(streams=AZURE_LIKE, duration=4000.0)))
    assert [p.due for p in plan] == sorted(p.due for p in plan)
    for stream in AZURE_LIKE:
        own = [p for p in plan if p.tag == stream.tag]
        assert len(own) / 4000 == pytest.approx(stream.rate, rel=0.2)
        middle = sorted(p.output_tokens or 0 for p in own)[len(own) // 2]
        assert middle == pytest.approx(stream.output, rel=0.1)
