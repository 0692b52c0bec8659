"""The evaluation's tables and pictures say what the results say, and call a miss a miss."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from bench.figures import page, reckoned, runs, tables
from bench.figures.found import Found
from bench.figures.found import fullest as served_curves
from bench.figures.text import CAUTION
from shared import profile


def test_the_ideal_mode_is_reckoned_from_the_requests_not_from_what_became_of_them() -> None:
    """A hundred requests a second of 1,000 and 100 tokens: by hand from the profile."""
    asked = {"offered": 1000, "duration": 10.0, "completed": 900, "good": 1}
    asked |= {"total_input_tokens": 900_000, "total_output_tokens": 90_000}
    model = profile.load("h20-8b").coefficients
    found = reckoned.ideal(runs.Plan(replicas=64), asked)
    assert found.offered == 100.0
    assert found.carried == pytest.approx(max(model.rate(b, 0, 1000, 100) for b in range(1, 257)))
    assert found.replicas == {"round_robin": 64, "collm": math.ceil(120 / found.carried)}
    for policy, level in found.level.items():
        assert level == pytest.approx(100 / found.replicas[policy])
        in_flight, seconds = found.in_flight[policy], found.seconds[policy]
        assert in_flight == pytest.approx(level * seconds), "b* = lambda tau"
        assert seconds == pytest.approx(model.service(in_flight, 0, 1000, 100))
    assert reckoned.ideal(runs.Plan(replicas=2), asked).level["collm"] == found.carried


def test_the_level_lines_are_the_ideal_and_the_distance_is_from_it() -> None:
    found = msgspec.structs.replace(
        _found("smollm2"),
        served={"round_robin": [[1.0, 1.0, 1.0]], "collm": [[9.0, 3.0], [0.0, 1.0]]},
        ideal=IDEAL,
    )
    assert served_curves(found) == {
        "round_robin": [1.0, 1.0, 1.0],
        "collm": [9.0, 3.0],
        "ideal, 16 replicas": [1.0, 1.0, 1.0],
        "ideal, 4 replicas": [3.0, 3.0, 3.0],
    }
    rows = tables.ideal(found).splitlines()
    assert rows[2] == "| round_robin | 16 | 1.00 | 0.50 | 0.5 | 0.00 |"
    assert rows[3] == "| collm | 4 | 3.00 | 2.00 | 6.0 | 1.41 |", "sqrt((6² + 0²) / 2) / 3"


def test_utilisation_in_a_lull_is_that_of_the_calmest_tenth_while_requests_come() -> None:
    offered = [9.0] * 20
    offered[3] = offered[7] = 1.0
    series = {
        "bucket_seconds": 1.0,
        "offered": [*offered, 5.0, 0.0, 0.0],  # then only what is left ends
        "utilisation_bucket_seconds": 1.0,
        "utilisation": [[0.1] * 23, [0.2] * 23],
        "training": [[0.0] * 3 + [0.8], [0.0] * 7 + [0.1]],
    }
    assert reckoned.lull({"by_time": series}) == pytest.approx((0.8 + 0.1 + 0.2 + 0.2) / 4)


def test_the_isolated_design_is_compared_by_goodput_at_two_loads() -> None:
    cases = runs.split(runs.Plan(), 0.5)
    assert {c.load for c in cases} == {2, 4}
    assert len(cases) == 8
    results = {
        2: {"collm (shared)": {tables.GOODPUT: 300.0}, "split": {tables.GOODPUT: 100.0}},
        4: {"collm (shared)": {tables.GOODPUT: 300.0}, "split": {tables.GOODPUT: 0.0}},
    }
    text = tables.by_load(results, {"goodput": tables.GOODPUT}, " (v2: up to 3x)")
    assert "At 2x:\n\n| | goodput | goodput, collm / this (v2: up to 3x) |" in text
    assert "| split | 100 | 3 |" in text
    assert "| split | 0 | – |" in text


def test_nothing_is_ablated_that_a_simulation_cannot_tell() -> None:
    """All replicas serve the same version: an order by quality is no order."""
    cases = runs.ablations(runs.Plan(), 0.5)
    assert not any("quality" in c.name for c in cases)
    assert "served" not in CAUTION.split("depend on the curve")[1]


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
    assert "| collm | 101 ± 1 | 101 ± 1 |" in tables.table(results, "goodput_tokens_per_s", ",.0f")
    assert "| code | dlora | 1.98 | 1.98 | 1.98 | 1.98 | 1.16 |" in tables.ratios(results)


def test_q_goodput_over_peft_is_that_of_conversation_alone_and_may_miss() -> None:
    results = [
        {
            "policy": policy,
            "load": load,
            "tags": {"conv": {"q_goodput": value}, "code": {"q_goodput": 1e6}},
        }
        for load in runs.LOADS
        for policy, value in (("collm", 24.0), ("peft", 10.0))
    ]
    rows = tables.over_peft(results).splitlines()
    assert rows[4] == "| 3x | 2.40 **missed** | 2.5 | 2.2 |"
    assert rows[2] == "| 1x | 2.40 | – | up to 1.68 |"
    assert "| 3x | – | 2.5 | 2.2 |" in tables.over_peft(
        [r for r in results if r["policy"] != "peft"]
    )


def test_the_worst_interval_is_the_worst_of_any_seed_and_a_miss_is_called_one() -> None:
    kept = {"hold_share": 0.01, "decision_share": 0.0, "decision_ms": 0.1}
    results = [
        {"policy": "collm", "load": load, "overhead": {**kept, "hold_share_worst": worst}}
        for load in runs.LOADS
        for worst in (0.01, 0.02 * load)
    ]
    rows = tables.overhead(results).splitlines()[2:]
    worst = [row.split("|")[3].strip() for row in rows]
    assert worst == ["2.00%", "4.00%", "6.00% **missed**", "8.00% **missed**"]


def test_a_ratio_under_one_stands_out() -> None:
    results = [
        {"load": load, **_result(policy, 0, 99.0 if policy == "collm" else 100.0)}
        for load in runs.LOADS
        for policy in runs.policies()
    ]
    assert "| code | dlora | **0.99** | **0.99** | **0.99** | **0.99** | 1.16 |" in tables.ratios(
        results
    )


IDEAL = reckoned.Ideal(
    offered=16.0,
    carried=4.0,
    replicas={"round_robin": 16, "collm": 4},
    level={"round_robin": 1.0, "collm": 3.0},
    seconds={"round_robin": 0.5, "collm": 2.0},
    in_flight={"round_robin": 0.5, "collm": 6.0},
)


def _found(curve: str) -> Found:
    """Ours at 1x: a hundred thousand samples, each gone through seven times and a half."""
    training = {"samples": 100_236.0, "micro_steps": 119_354.0, "quality_at_end": 1.25}
    return Found(
        plan=runs.Plan(curve=curve),
        unit=1.0,
        results=[{"policy": "collm", "load": 1, "training": training}],
        served={},
        dispersion={},
        ideal=IDEAL,
        pairs={},
        completion={},
        split={},
        adapted={},
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
    assert "**all but the first minutes is extrapolated**" in told
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
    assert reckoned.completion(pairs) == {"coordinator": 1.0, "(16, 4)": 1.5}
