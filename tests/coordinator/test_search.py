"""The search for (B*, b*): capacity first, then training goodput."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.coordinator.goodput import Progress, efficiency, goodput
from services.coordinator.search import Demand, Member, b_star, cycle, rate, search
from shared.latency import LatencyModel

MODEL = LatencyModel(
    alpha1=0.002, alpha2=0.004, alpha0=0.03, pi1=1e-4, pi0=0.01, gamma1=0.1, gamma2=0.01, gamma0=0.1
)


def member(name: str = "r0", **changes: object) -> Member:
    values: dict[str, object] = {"id": name, "model": MODEL, "b_max": 64, "trains": True}
    return Member(**{**values, **changes})  # type: ignore[arg-type]


def demand(per_second: float, **changes: object) -> Demand:
    values: dict[str, object] = {"rate": per_second, "budget": 4.0, "slo": 5.0, "output": 64.0}
    return Demand(**{**values, **changes})  # type: ignore[arg-type]


def test_an_idle_cluster_trains_at_the_best_goodput() -> None:
    choice = search([member()], demand(0.0))["r0"]
    values = {
        B: goodput(B, 0, MODEL, Progress(), B0=4)
        for B in range(1, 17)
        if b_star(member(), B, demand(0.0)) >= 1
    }
    assert max(values, key=lambda B: values[B]) == choice.B
    assert choice.B > 0


def test_load_beyond_what_any_training_leaves_suspends_it() -> None:
    choice = search([member()], demand(1000.0))["r0"]
    assert choice.B == 0
    assert choice.b == b_star(member(), 0, demand(0.0))
    assert "no B keeps" in choice.why


def test_rising_load_never_raises_the_training_batch() -> None:
    sizes = [search([member()], demand(r))["r0"].B for r in (0, 2, 4, 6, 8, 10, 12, 16)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] == 0


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 40), st.integers(1, 4), st.floats(0, 0.05), st.floats(0, 0.5))
def test_what_is_chosen_carries_the_load_that_the_others_leave(
    per_second: float, replicas: int, alpha2: float, headroom: float
) -> None:
    model = LatencyModel(alpha1=0.002, alpha2=alpha2, alpha0=0.03, gamma1=0.1, gamma0=0.1)
    members = [member(f"r{i}", model=model, quality=1.0 + i) for i in range(replicas)]
    asked = demand(per_second, headroom=headroom)
    choices = search(members, asked)
    for m in members:
        choice = choices[m.id]
        assert 1 <= choice.b <= m.b_max
        if choice.B > 0:
            assert rate(m, choice.B, asked) >= choice.needed
    full = sum(rate(m, 0, asked) for m in members)
    carried = sum(rate(m, choices[m.id].B, asked) for m in members)
    wanted = (1 + headroom) * per_second
    assert carried >= min(wanted, full) - 1e-9


def test_the_lowest_quality_is_decided_first_so_the_best_adapter_keeps_serving() -> None:
    good, bad = member("good", quality=2.0), member("bad", quality=1.0)
    one_trains = rate(good, 0, demand(0.0)) + rate(bad, 1, demand(0.0))
    choices = search([good, bad], demand(0.99 * one_trains / (1 + Demand().headroom)))
    assert choices["bad"].B > 0 == choices["good"].B


def test_a_replica_that_the_dispatcher_wants_to_itself_does_not_train() -> None:
    assert search([member(suspended=True)], demand(0.0))["r0"].B == 0


def test_without_a_model_training_starts_small() -> None:
    choice = search([member(model=None)], demand(0.0))["r0"]
    assert (choice.B, choice.b) == (4, 64)


def test_a_large_noise_scale_prefers_large_batches() -> None:
    def chosen(noise: float) -> int:
        return search([member(progress=Progress(noise_scale=noise))], demand(0.0, budget=None))[
            "r0"
        ].B

    assert chosen(1.0) < chosen(1e4) == 16


def test_efficiency_is_one_loss_reduction_at_the_starting_batch_and_falls_with_size() -> None:
    progress = Progress(loss_reduction=0.01, noise_scale=32.0)
    assert efficiency(4, 4, progress) == pytest.approx(0.01)
    values = [efficiency(B, 4, progress) for B in range(1, 17)]
    assert values == sorted(values, reverse=True)
    # effective batches: 8 B and 8 B0 against the noise scale
    assert efficiency(8, 4, progress) == pytest.approx(0.01 * (32 + 32) / (32 + 64))


def test_the_first_round_observes_the_serving_side_with_and_without_training() -> None:
    assert cycle(4, 16) == (4, 0, 8)
    assert cycle(4, 6) == (4, 0, 6)
    assert cycle(4, 16, rests=False) == (4, 8)  # serving alone is known already


def test_efficiency_counts_the_micro_batches_that_a_step_really_has() -> None:
    """The fewer make a step, the longer larger ones pay off."""
    few, many = (search([member(accumulation=m)], demand(0.0))["r0"] for m in (1, 8))
    assert few.B > many.B


def test_a_limit_that_short_requests_name_is_not_held_against_long_ones() -> None:
    mixed = demand(0.1, budget=0.5, slo=0.5, output=200.0)
    assert search([member()], mixed)["r0"].B == 0
    told = demand(0.1, budget=0.5, slo=0.5, output=200.0, limited_prompt=50.0, limited_output=5.0)
    assert search([member()], told)["r0"].B > 0
