"""The evaluation can be cut and taken up again; its tables say what the results say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.figures import page, runs
from bench.figures.store import OutOfTime, Store
from sim.scenario import Scenario
from sim.workload import Workload


def _say(_: str) -> None:
    return None


def test_a_known_result_is_not_simulated_again_and_a_new_one_waits_for_time(
    tmp_path: Path,
) -> None:
    calls = []

    def find() -> dict[str, Any]:
        calls.append(1)
        return {"value": len(calls)}

    store = Store(tmp_path, None, _say)
    assert store.known(["a", 1], find) == store.known(["a", 1], find) == {"value": 1}
    late = Store(tmp_path, -1.0, _say)
    assert late.known(["a", 1], find) == {"value": 1}
    with pytest.raises(OutOfTime):
        late.known(["a", 2], find)
    assert store.known(["a", 2], find) == {"value": 2}


def test_a_scenario_is_known_by_everything_that_decides_its_outcome(tmp_path: Path) -> None:
    store = Store(tmp_path, None, _say)
    work = Workload(rate=5.0, limit=20)
    first = store.run(Scenario(replicas=1, workload=work))
    again = store.run(Scenario(replicas=1, workload=work))
    other = store.run(Scenario(replicas=2, workload=work))
    assert first == again
    assert other["replicas"] == 2
    assert len(list(tmp_path.glob("*.json"))) == 2


def _result(policy: str, seed: int, goodput: float) -> dict[str, Any]:
    tags = {tag: {"goodput_tokens_per_s": goodput} for tag in ("code", "conv")}
    return {"policy": policy, "seed": seed, "goodput_tokens_per_s": goodput, "tags": tags}


def test_tables_show_mean_and_spread_over_seeds_and_ratios_of_means() -> None:
    results = [
        {"load": load, **_result(policy, seed, value + 2 * seed)}
        for load in runs.LOADS
        for policy in runs.policies()
        for seed, value in enumerate((100.0 if policy == "collm" else 50.0,) * 2)
    ]
    assert "| collm | 101 ± 1 | 101 ± 1 |" in page.table(results, "goodput_tokens_per_s", ",.0f")
    assert "| code | dlora | 1.98 | 1.98 | 1.98 | 1.98 | 1.16 |" in page.ratios(results)


def test_the_worst_interval_is_the_worst_of_any_seed_and_a_miss_is_called_one() -> None:
    kept = {"hold_share": 0.01, "decision_share": 0.0, "decision_ms": 0.1}
    results = [
        {"policy": "collm", "load": load, "overhead": {**kept, "hold_share_worst": worst}}
        for load in runs.LOADS
        for worst in (0.01, 0.02 * load)
    ]
    rows = page.overhead(results).splitlines()[2:]
    worst = [row.split("|")[3].strip() for row in rows]
    assert worst == ["2.00%", "4.00%", "6.00% **missed**", "8.00% **missed**"]


def test_a_ratio_under_one_stands_out() -> None:
    results = [
        {"load": load, **_result(policy, 0, 99.0 if policy == "collm" else 100.0)}
        for load in runs.LOADS
        for policy in runs.policies()
    ]
    assert "| code | dlora | **0.99** | **0.99** | **0.99** | **0.99** | 1.16 |" in page.ratios(
        results
    )


def _found(curve: str) -> page.Found:
    """Ours at 1x: a hundred thousand samples, each gone through seven times and a half."""
    training = {"samples": 100_236.0, "micro_steps": 119_354.0, "quality_at_end": 1.25}
    return page.Found(
        plan=runs.Plan(curve=curve),
        unit=1.0,
        results=[{"policy": "collm", "load": 1, "training": training}],
        served={},
        dispersion={},
        pairs={},
        completion={},
        split={},
        ablations={},
        fit={},
        memory={},
        cost={},
        cost_requests=0,
    )


def test_the_page_says_how_far_the_curve_is_carried() -> None:
    told = " ".join(page.caution(_found("smollm2")).split())
    assert "up to 1,116 samples, cross-entropy 1.229" in told
    assert "learns 100,000 samples at 1x and the curve falls to 0.80" in told
    assert "begins at 11,000 samples, 10 times as many as were seen" in told
    assert "quality is 0.81, 1.44 times the initial adapter's 0.57" in told
    assert "gone through at least 7 times" in told
    assert "assumption, not measured" in page.caution(_found("assumed"))


def test_time_to_completion_is_that_to_the_loss_which_all_reach() -> None:
    histories = {
        "coordinator": [[0.0, 2.0], [10.0, 1.5], [20.0, 1.2]],
        "(16, 4)": [[0.0, 2.0], [30.0, 1.4]],
    }
    pairs = {k: {"training": {"cross_entropy": v}} for k, v in histories.items()}
    assert runs.completion(pairs) == {"coordinator": 1.0, "(16, 4)": 1.5}
