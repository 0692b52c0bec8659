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


def test_time_to_completion_is_that_to_the_loss_which_all_reach() -> None:
    histories = {
        "coordinator": [[0.0, 2.0], [10.0, 1.5], [20.0, 1.2]],
        "(16, 4)": [[0.0, 2.0], [30.0, 1.4]],
    }
    pairs = {k: {"training": {"cross_entropy": v}} for k, v in histories.items()}
    assert runs.completion(pairs) == {"coordinator": 1.0, "(16, 4)": 1.5}
