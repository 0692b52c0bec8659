"""The emulated engine that decides in each iteration what is merged and who runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.replica.engines.emulated import EmulatedEngine
from services.replica.settings import ReplicaSettings
from tests.replica.harness import generate
from tests.replica.test_emulated import engine, run_out

FAST = {"merged_speedup": 2.0, "merge_seconds": 0.0}
SCALE = 1e9  # no time passes


def made(lora: str = "dynamic", **changes: Any) -> EmulatedEngine:
    values = {"seconds": 0.01, "profile": FAST, "time_scale": SCALE, **changes}
    found = engine(lora=lora, **values)
    for name in ("x", "y", "z"):
        found.load_adapter(name, "1", "")
    return found


async def seconds(one: EmulatedEngine, asked: list[str | None]) -> float:
    """Emulated seconds for ten tokens each."""
    for i, name in enumerate(asked):
        one.submit(generate(str(i), adapter=name, tokens=10))
    return sum(r.seconds for r in await run_out(one)) * SCALE


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from(["x", "y", "z", None]), st.integers(1, 60), st.integers(1, 20)),
        min_size=1,
        max_size=14,
    ),
    b=st.integers(1, 5),
    kv=st.integers(80, 300),
)
def test_three_adapters_and_the_base_are_answered_within_all_limits(
    requests: list[tuple[str | None, int, int]], b: int, kv: int
) -> None:
    one = made(b=b, kv=kv, max_step_tokens=16)
    for i, (name, prompt, tokens) in enumerate(requests):
        one.submit(generate(str(i), adapter=name, prompt=tuple([5] * prompt), tokens=tokens))

    async def drive() -> dict[str, int]:
        counts: dict[str, int] = {}
        while one.has_work():
            report = await one.step()
            assert 0 < report.b <= b
            assert 0 <= one.status().kv_used <= kv
            for _, output in report.outputs:
                assert output.offset == counts.get(output.id, 0)
                counts[output.id] = output.offset + 1
        return counts

    assert asyncio.run(drive()) == {str(i): n for i, (_, _, n) in enumerate(requests)}
    assert one.status().kv_used == 0


@pytest.mark.parametrize(
    ("asked", "like"),
    [(["x"] * 4, "merged"), (["x", "y", "z"], "unmerged"), ([None] * 4, "unmerged")],
)
async def test_it_is_as_fast_as_the_mode_that_fits(asked: list[str | None], like: str) -> None:
    found = await seconds(made(), asked)
    assert found == pytest.approx(await seconds(made(like), asked))
    other = "unmerged" if like == "merged" else "merged"
    assert found != pytest.approx(await seconds(made(other), asked))


async def test_each_switch_costs_its_time() -> None:
    """x alone is merged, beside more of y it is not, and y is left alone: three switches."""
    free, dear = made(), made(profile={**FAST, "merge_seconds": 0.5})
    total = {}
    for one in (free, dear):
        one.submit(generate("a", adapter="x", tokens=5))
        reports = [await one.step() for _ in range(3)]
        one.submit(generate("b", adapter="y", tokens=20))
        one.submit(generate("c", adapter="y", tokens=20))
        reports += await run_out(one)
        total[one] = sum(r.seconds for r in reports) * SCALE
    assert total[dear] - total[free] == pytest.approx(3 * 0.5)


async def test_who_pauses_for_the_merged_adapter_keeps_its_memory_and_goes_on() -> None:
    one = made(b=2)
    one.submit(generate("rare", adapter="y", tokens=30))
    for i in range(12):
        one.submit(generate(f"x{i}", adapter="x", tokens=30))
        await one.step()
    tokens = [o.id for r in [await one.step() for _ in range(5)] for _, o in r.outputs]
    assert "rare" not in tokens, "x is merged"
    assert one.status().running == 3, "two run, one pauses"
    assert one.status().kv_used == 3 * (4 + 30)
    ended = [f.id for r in await run_out(one) for f in r.finished]
    assert len(ended) == 13
    assert ended.index("rare") < 11, "it does not wait for the end of the flood"


async def test_a_paused_request_can_be_cancelled() -> None:
    one = made(b=2)
    one.submit(generate("rare", adapter="y", tokens=30))
    for i in range(6):
        one.submit(generate(f"x{i}", adapter="x", tokens=30))
        await one.step()
    assert one.status().running == 3
    assert one.cancel("rare")
    reports = await run_out(one)
    reasons = {f.id: f.reason for r in reports for f in r.finished}
    assert reasons.pop("rare") == "cancelled"
    assert len(reasons) == 6
    assert one.status().kv_used == 0


async def test_two_versions_of_an_adapter_are_never_merged_together() -> None:
    one, same = made(), made()
    one.load_adapter("x", "2", "", current=False)
    one.submit(generate("new", adapter="x", adapter_version="2", tokens=10))
    both = await seconds(one, ["x"])
    assert both == pytest.approx(await seconds(made("unmerged"), ["x", "y"]))
    assert both > await seconds(same, ["x", "x"])


async def test_an_adapter_that_lost_its_place_while_paused_is_fetched_again() -> None:
    profile = {**FAST, "adapter_seconds": 1.0, "adapter_slots": 1}
    one = made(b=1, profile=profile)
    found = await seconds(one, ["x", "y"])
    assert found - 0.2 + 0.09 == pytest.approx(2.0), "one after the other: two fetches"


def test_static_batches_cannot_be_chosen_anew_in_each_step() -> None:
    with pytest.raises(ValidationError, match="static"):
        ReplicaSettings(engine="emulated", lora="dynamic", batching="static")
