"""(B*, b*) and goodput worked out by hand, choice by choice."""

from __future__ import annotations

import math
from typing import Any

import pytest

from services.coordinator.goodput import (
    LEAST_LOSS_REDUCTION,
    MOST_NOISE,
    NOISE_MEMORY,
    Progress,
    efficiency,
    goodput,
    noise_scale,
    pooled,
)
from services.coordinator.search import (
    LOAD_FLOOR,
    Choice,
    Demand,
    Member,
    b_star,
    cycle,
    rate,
    search,
)
from services.coordinator.telemetry import ADAPTERS_KEPT, Telemetry
from shared.latency import LatencyModel
from shared.rounds import GradientNoise

# Beside B: 0.1 B + 10 (0.1 B + 0.01 b + 0.09) + 0.01 b s for 10 prompt and 10 output tokens.
MODEL = LatencyModel(
    alpha1=0.01, alpha2=0.1, alpha0=0.09, pi1=0.001, pi2=0.1, gamma1=0.5, gamma2=0.1, gamma0=0.5
)


def member(name: str = "r", **changes: Any) -> Member:
    values: dict[str, Any] = {
        "id": name, "model": MODEL, "b_max": 10, "trains": True, "B_max": 4, "B0": 2,
    }  # fmt: skip
    return Member(**(values | changes))


def demand(**changes: Any) -> Demand:
    values: dict[str, Any] = {"prompt": 10.0, "output": 10.0, "headroom": 0.5}
    return Demand(**(values | changes))


# ------------------------------------------------------------ goodput


def test_progress_begins_with_its_first_round_and_keeps_a_half_afterwards() -> None:
    first = Progress(noise_scale=64.0).updated(0.02)
    assert first == Progress(loss_reduction=0.02, noise_scale=64.0, rounds=1)
    second = first.updated(0.04)
    assert second.loss_reduction == pytest.approx(0.03)
    third = second.updated(0.01, keep=0.75)
    assert third.loss_reduction == pytest.approx(0.025)
    assert (second.rounds, third.rounds, third.noise_scale) == (2, 3, 64.0)


@pytest.mark.parametrize("nonsense", [None, math.nan, math.inf, -math.inf])
def test_what_is_missing_or_not_finite_changes_nothing(nonsense: float | None) -> None:
    first = Progress().updated(0.02)
    assert first.updated(nonsense) == Progress(loss_reduction=0.02, rounds=2)


def test_progress_has_a_floor() -> None:
    assert Progress().updated(-5.0) == Progress(loss_reduction=LEAST_LOSS_REDUCTION, rounds=1)
    assert efficiency(2, 2, Progress(loss_reduction=0.0)) == LEAST_LOSS_REDUCTION
    assert Progress() == Progress(loss_reduction=1e-4, noise_scale=16.0, rounds=0)


def test_efficiency_counts_effective_batches() -> None:
    progress = Progress(loss_reduction=0.5, noise_scale=16.0)
    assert efficiency(4, 2, progress) == pytest.approx(0.5 * (16 + 8 * 2) / (16 + 8 * 4))
    assert efficiency(4, 2, progress, 1) == pytest.approx(0.5 * 18 / 20)


def test_goodput_is_samples_a_second_times_what_one_brings() -> None:
    progress = Progress(loss_reduction=0.5, noise_scale=16.0)
    seconds = 0.5 * 4 + 0.1 * 3 + 0.5
    assert goodput(4, 3, MODEL, progress, B0=2) == pytest.approx(4 / seconds * 0.5 * 32 / 48)
    assert goodput(4, 3, MODEL, progress, B0=2, accumulation=1) == pytest.approx(
        4 / seconds * 0.5 * 18 / 20
    )
    assert goodput(1, 0, MODEL, progress, B0=1) == pytest.approx(0.5)
    assert goodput(0, 3, MODEL, progress, B0=2) == 0.0
    assert goodput(-1, 3, MODEL, progress, B0=2) == 0.0
    assert goodput(4, 3, LatencyModel(), progress, B0=2) == 0.0, "a model of nothing"
    assert goodput(4, 3, MODEL, progress, B0=2, fixed=seconds) == pytest.approx(
        4 / (2 * seconds) * 0.5 * 32 / 48
    )


def test_the_less_of_a_round_is_training_the_more_a_large_batch_pays() -> None:
    """B costs nothing of the seconds that a round takes in any case."""
    paper, short = (best(member(fixed=f, progress=Progress(noise_scale=16.0))) for f in (0.0, 9.0))
    assert paper.B < short.B


def noise(gradient: float, trace: float, count: int = 2) -> GradientNoise:
    return GradientNoise(gradient=gradient, trace=trace, count=count)


def test_noise_is_the_mean_over_the_steps_of_all_clients() -> None:
    both = pooled(pooled(None, noise(1.0, 10.0)), noise(-0.2, 40.0, count=6))
    assert both is not None
    assert both.count == 8
    assert both.gradient == pytest.approx(0.1)
    assert both.trace == pytest.approx(32.5)
    assert noise_scale(both) == pytest.approx(325.0)
    assert pooled(both, None) == pooled(both, noise(math.nan, 1.0)) == both
    assert pooled(both, noise(1.0, math.inf)) == both


def test_old_steps_fade_when_many_have_followed() -> None:
    old = noise(1.0, 1.0, count=100 * NOISE_MEMORY)
    new = pooled(old, noise(3.0, 5.0, count=NOISE_MEMORY))
    assert new == noise(2.0, 3.0, count=2 * NOISE_MEMORY)


@pytest.mark.parametrize("lost", [None, noise(-1.0, 5.0), noise(0.0, 5.0), noise(1.0, -5.0),
                                  noise(1.0, 2 * MOST_NOISE)])  # fmt: skip
def test_a_gradient_that_is_lost_in_its_noise_gives_no_scale(lost: GradientNoise | None) -> None:
    assert noise_scale(lost) is None


def test_the_noise_scale_is_the_adapters_and_the_fall_of_the_loss_the_replicas() -> None:
    telemetry = Telemetry()
    telemetry.client_ended("a", "r0", 0.5, noise(1.0, 30.0))
    telemetry.client_ended("a", "r1", 0.25, noise(1.0, 50.0))
    assert telemetry.progress("a", "r0") == Progress(loss_reduction=0.5, noise_scale=40, rounds=1)
    assert telemetry.progress("a", "r1") == Progress(loss_reduction=0.25, noise_scale=40, rounds=1)
    assert telemetry.progress("other", "r2") == Progress()


def test_what_a_round_costs_beside_training_is_smoothed_and_kept_for_the_latest_adapters() -> None:
    telemetry = Telemetry()
    assert telemetry.round_cost("a") == 0.0
    for seconds, wanted in ((4.0, 4.0), (8.0, 6.0)):
        telemetry.round_ended("a", seconds)
        assert telemetry.round_cost("a") == wanted
    for number in range(ADAPTERS_KEPT):
        telemetry.round_ended(f"adapter-{number}", 1.0)
    assert telemetry.round_cost("a") == 0.0
    assert telemetry.round_cost("adapter-0") == 1.0


# ------------------------------------------------------------ b*


def test_without_a_model_or_a_limit_the_batch_is_what_memory_holds() -> None:
    assert b_star(member(model=None), 1, demand(budget=0.1)) == 10
    assert b_star(member(), 1, demand()) == 10
    assert b_star(member(), 1, demand(slo=0.1)) == 10, "no budget was worked out from it"


def test_the_budget_and_the_pace_bound_the_batch() -> None:
    # alone: 0.9 + 0.11 b; beside B = 1: 2.0 + 0.11 b
    assert b_star(member(), 0, demand(budget=1.5)) == 5
    assert b_star(member(), 1, demand(budget=2.5)) == 4
    assert b_star(member(), 0, demand(tpot=0.12)) == 3
    assert b_star(member(), 0, demand(tpot=0.12, budget=1.15)) == 2
    assert b_star(member(), 1, demand(budget=1.5)) == 1, "one request, which would go alone"
    assert b_star(member(), 1, demand(budget=0.5)) == 0
    assert b_star(member(), 1, demand(budget=0.5, slo=1.5)) == 1
    assert b_star(member(b_max=2), 0, demand(budget=1.5)) == 2


def test_the_lengths_under_the_limit_count_where_they_are_known() -> None:
    asked = demand(budget=1.5, prompt=1000.0, output=100.0)
    assert b_star(member(), 0, asked) == 0
    short = demand(budget=1.5, prompt=1000.0, output=100.0, limited_prompt=10.0, limited_output=10)
    assert b_star(member(), 0, short) == 5


def test_the_rate_is_that_of_all_requests_at_the_batch() -> None:
    assert rate(member(), 0, demand(budget=1.5)) == pytest.approx(5 / 1.45)
    assert rate(member(), 1, demand(budget=2.5)) == pytest.approx(4 / 2.44)
    assert rate(member(), 1, demand(budget=0.5)) == 0.0, "no batch keeps it"
    assert rate(member(model=None), 1, demand(budget=0.5)) == 0.0, "unknown"
    mixed = demand(budget=1.5, prompt=20.0, output=20.0, limited_prompt=10.0, limited_output=10.0)
    assert rate(member(), 0, mixed) == pytest.approx(5 / (0.1 + 20 * 0.14))


# ------------------------------------------------------------ the choice


def best(*members: Member, **asked: Any) -> Choice:
    return search(members, demand(**asked))[members[0].id]


def test_the_batch_with_the_best_goodput_is_chosen_with_its_numbers() -> None:
    """As of a replica with nothing beside, whatever it could serve."""
    progress = Progress(noise_scale=50.0)
    choice = best(member(progress=progress))
    values = {B: goodput(B, 0, MODEL, progress, B0=2) for B in range(1, 5)}
    top = max(values, key=lambda B: values[B])
    assert choice == Choice(
        B=top, b=10, goodput=values[top], rate=pytest.approx(rate(member(), top, demand())),
        needed=0.0, why="best training goodput of B = 1..4",
    )  # fmt: skip
    assert 1 < top < 4, "else the first or last would do"


def test_a_batch_at_most_doubles_from_round_to_round() -> None:
    learns = {"progress": Progress(noise_scale=1e6), "B_max": 16}
    assert [best(member(B=B, **learns)).B for B in (0, 1, 3, 8, 16)] == [16, 2, 6, 16, 16]
    assert best(member(B=3, **learns)).why == "best training goodput of B = 1..6"
    assert best(member(B=8, progress=Progress(noise_scale=1e-6))).B == 1, "it may fall at once"


def test_each_batch_is_considered_from_one_to_the_largest() -> None:
    assert best(member(progress=Progress(noise_scale=1e6))).B == 4
    assert best(member(progress=Progress(noise_scale=1e-6), B_max=16)).B == 1
    flat = LatencyModel(alpha0=0.01, gamma1=1.0)
    assert best(member(model=flat, progress=Progress(noise_scale=1e15), B0=1)).B == 1, "a tie"


def test_what_the_others_leave_must_be_carried() -> None:
    """1.5 times the demand; the other one carries its own rate alone."""
    other = member("s", trains=False, B=3)
    alone = rate(other, 0, demand(budget=9.0))
    one = rate(member(), 1, demand(budget=9.0))
    for share, trains in ((0.99, True), (1.01, False)):
        choice = best(member(), other, rate=(alone + share * one) / 1.5, budget=9.0, slo=9.0)
        assert (choice.B > 0) is trains
        assert choice.needed == pytest.approx(share * one)
    assert choice.why == f"no B keeps {1.01 * one:.3f} requests/s within the SLO"
    assert choice == Choice(
        B=0, b=b_star(member(), 0, demand(budget=9.0)), rate=alone, needed=choice.needed,
        why=choice.why,
    )  # fmt: skip


def test_one_that_just_carries_what_is_needed_trains() -> None:
    exact = rate(member(), 1, demand())
    choice = best(member(B_max=1), rate=exact, headroom=0.0)
    assert (choice.B, choice.needed, choice.rate) == (1, exact, exact)


def test_replicas_are_decided_in_turn_each_against_what_the_others_carry_now() -> None:
    """Both train at first; the first one to be decided gives way, the second need not."""
    idle, full = rate(member(), 0, demand()), rate(member(), 4, demand())
    members = [member("good", quality=2.0, B=4), member("bad", quality=1.0, B=4)]
    asked = demand(rate=(idle + full) * 0.999 / 1.5)
    choices = search(members, asked)
    assert list(choices) == ["bad", "good"]
    assert choices["bad"].needed == pytest.approx((idle + full) * 0.999 - full)
    assert choices["good"].needed == pytest.approx((idle + full) * 0.999 - choices["bad"].rate)
    assert choices["good"].B > 0


def test_equal_qualities_go_by_name_and_only_those_that_train_are_decided() -> None:
    members = [member("c"), member("b", trains=False), member("a")]
    assert list(search(members, demand())) == ["a", "c"]


def test_a_suspended_one_serves_at_its_batch_alone() -> None:
    choice = best(member(suspended=True), budget=1.5, rate=1.0)
    assert choice == Choice(
        B=0, b=5, rate=pytest.approx(5 / 1.45), needed=1.5, why="the dispatcher asked for B = 0"
    )
    assert best(member(suspended=True, model=None)).B == 0
    assert best(member(suspended=True), budget=0.1).b == 1, "one at least"


def test_without_a_model_training_starts_at_b0() -> None:
    choice = best(member(model=None), rate=2.0)
    assert choice == Choice(B=2, b=10, needed=3.0, why="no latency model yet")


def test_training_that_makes_requests_miss_their_limit_waits_while_there_is_load() -> None:
    """Beside B = 1 a lone request takes 2.11 s, alone 1.01."""
    limits = {"budget": 1.5, "slo": 2.0}
    assert best(member(), rate=LOAD_FLOOR * 1.01, headroom=0.0, **limits).B == 0
    assert best(member(), rate=LOAD_FLOOR, headroom=0.0, **limits).B > 0, "no load"
    assert best(member(), rate=0.1, budget=1.5, slo=2.2).B == 1
    assert best(member(), rate=0.1, budget=9.0, headroom=0.0).B > 0, (
        "without a limit none is missed"
    )
    told = {"limited_prompt": 10.0, "limited_output": 5.0}  # 0.1 + 0.01 + 5 * 0.2
    assert best(member(B_max=1), rate=0.1, budget=1.0, slo=1.12, **told).B == 1
    assert best(member(B_max=1), rate=0.1, budget=1.0, slo=1.10, **told).B == 0


def test_a_first_round_observes_every_slope() -> None:
    assert cycle(4, 16) == (4, 0, 8)
    assert cycle(4, 6) == (4, 0, 6)
    assert cycle(4, 16, rests=False) == (4, 8)


def test_the_micro_batches_of_a_step_are_those_of_the_member() -> None:
    choice = best(member(accumulation=2, B_max=1))
    assert choice.goodput == goodput(1, 0, MODEL, Progress(), B0=2, accumulation=2)


def test_defaults_are_those_of_the_table_of_symbols() -> None:
    assert Demand() == Demand(
        rate=0.0, prompt=128.0, output=128.0, budget=None, slo=None, tpot=None,
        limited_prompt=0.0, limited_output=0.0, headroom=0.2,
    )  # fmt: skip
    assert (LOAD_FLOOR, Member(id="r", model=None, b_max=1).B_max) == (1 / 60, 16)
