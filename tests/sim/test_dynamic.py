"""Simulated replicas that merge dynamically: as the emulated engine, iteration by iteration."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.replica.engines.emulated import EmulatedEngine, Options
from shared.latency import LatencyModel
from shared.messages import Sampling
from shared.profile import Profile
from shared.slo import Slo
from sim.job import Job
from sim.replica import Batching, Replica
from sim.scenario import Scenario, build
from sim.workload import Workload
from tests.replica.harness import generate
from tests.replica.test_emulated import CARD
from tests.sim.test_replica import drive, job

SCALE = 1e9  # no time passes
DYNAMIC = Batching(lora="dynamic")
Asked = list[tuple[float, str | None, int, int]]  # arrival, adapter, prompt, answer


def profile(**changes: Any) -> Profile:
    values = {
        "name": "p",
        "source": "test",
        "coefficients": LatencyModel(alpha0=0.0101, alpha1=0.00103, pi0=0.002, pi1=0.0001),
        "kv_tokens": 4000,
        "merged_speedup": 1.83,
        "merge_seconds": 0.013,
        "adapter_seconds": 0.0071,
        "adapter_slots": 2,
    }
    return Profile(**{**values, **changes})


def emulated(profile: Profile, asked: Asked, b: int) -> dict[str, float]:
    """Request -> emulated second of its end."""
    options = Options(time_scale=SCALE, lora="dynamic")
    made = EmulatedEngine(
        CARD,
        profile,
        words=tuple(range(100, 150)),
        b_max=b,
        kv_tokens=profile.kv_tokens,
        options=options,
        now=lambda: 0.0,
    )
    for name in ("x", "y", "z"):
        made.load_adapter(name, "1", "")
    waiting = sorted(enumerate(asked), key=lambda one: one[1][0])

    async def run() -> dict[str, float]:
        now, ended = 0.0, {}
        while waiting or made.has_work():
            if not made.has_work():
                now = max(now, waiting[0][1][0])
            while waiting and waiting[0][1][0] <= now + 1e-9:
                k, (_, name, prompt, tokens) = waiting.pop(0)
                sampling = Sampling(max_tokens=tokens, ignore_eos=True)
                prompts = tuple([5] * prompt)
                made.submit(generate(str(k), adapter=name, prompt=prompts, sampling=sampling))
            report = await made.step()
            now += report.seconds * SCALE
            ended |= {f.id: now for f in report.finished}
        return ended

    return asyncio.run(run())


def jobs(asked: Asked) -> list[tuple[float, Job]]:
    return [(at, job(str(k), p, n, name)) for k, (at, name, p, n) in enumerate(asked)]


def simulated(
    profile: Profile, asked: Asked, b: int, batching: Batching = DYNAMIC
) -> dict[str, float]:
    replica = Replica("r", "r0", profile, batching, b, 0)
    ended = drive(replica, jobs(asked))
    assert (replica.kv_used, replica.running) == (0, 0)
    return ended


cases = st.lists(
    st.tuples(
        st.floats(0, 2, allow_nan=False).map(lambda t: round(t, 3) + 0.000137),
        st.sampled_from([None, "x", "x", "x", "x", "y", "z"]),
        st.integers(1, 900),
        st.integers(1, 60),
    ),
    min_size=1,
    max_size=16,
)


@settings(max_examples=150, deadline=None)
@given(cases, st.integers(1, 6))
def test_the_simulator_agrees_with_the_emulated_engine(asked: Asked, b: int) -> None:
    expected, found = emulated(profile(), asked, b), simulated(profile(), asked, b)
    assert found.keys() == expected.keys()
    for name, time in expected.items():
        assert found[name] == pytest.approx(time, abs=1e-6)


def test_they_agree_on_a_flood_in_which_a_rare_adapter_waits_pauses_and_comes_first() -> None:
    asked: Asked = [(0.0, "x", 10, 200), (0.05, "y", 10, 30)]
    asked += [(0.1 + 0.0307 * k, "x", 10, 100) for k in range(40)]
    asked += [(1.5, "y", 10, 100), (1.6, "z", 10, 100)]
    expected, found = emulated(profile(), asked, 4), simulated(profile(), asked, 4)
    assert found == pytest.approx(expected)
    plain = simulated(profile(), asked, 4, Batching())
    assert plain["1"] < found["1"] < found["2"], "the rare one waits, but then comes first"
    assert max(found.values()) < 0.7 * max(plain.values())


@pytest.mark.parametrize(("name", "like"), [("x", "merged"), (None, "unmerged")])
def test_one_adapter_is_served_as_merged_and_the_base_as_ever(name: str, like: str) -> None:
    asked: Asked = [(0.1 * k, name, 300, 10 + 7 * k) for k in range(12)]
    found = simulated(profile(), asked, 4)
    assert found == pytest.approx(simulated(profile(), asked, 4, Batching(lora=like)))


def test_all_different_adapters_are_served_as_unmerged_in_long_spans() -> None:
    asked: Asked = [(0.0, name, 10, 50) for name in ("x", "y", "z")]
    slots = profile(adapter_slots=3)
    replica = Replica("r", "r0", slots, DYNAMIC, 8, 0)
    turn, turns = replica.accept([one for _, one in jobs(asked)], 0.0), 0
    ended: dict[str, float] = {}
    while turn is not None:
        ended |= {one.request.id: turn for one in replica.complete(turn)}
        turn, turns = replica.plan(turn), turns + 1
    assert ended == pytest.approx(simulated(slots, asked, 8, Batching()))
    assert turns <= 5, "nobody is displaced: iterations up to the next end are one span"


def test_a_paused_request_that_is_taken_back_frees_its_memory_and_may_come_again() -> None:
    replica = Replica("r", "r0", profile(), DYNAMIC, 2, 0)
    rare = job("rare", 10, 50, "y")
    turn = replica.accept([rare, *(job(f"x{k}", 10, 50, "x") for k in range(8))], 0.0)
    while rare.started < 0 or any(one is rare for _, _, one in replica.decoding):
        assert turn is not None
        replica.complete(turn)
        turn = replica.plan(turn)
    before = replica.kv_used
    assert replica.take_back({"rare"}) == [rare]
    assert replica.kv_used == before - rare.kv
    rare.reset()
    assert turn is not None
    replica.accept([rare], turn)
    ended: list[str] = []
    while turn is not None:
        ended += [one.request.id for one in replica.complete(turn)]
        turn = replica.plan(turn)
    assert "rare" in ended
    assert replica.kv_used == 0


PROFILE = """
name: small
source: test
coefficients: {alpha0: 0.01, alpha1: 0.0005, pi0: 0.002, pi1: 0.00005}
b_max: 8
kv_tokens: 6000
merged_speedup: 1.8
merge_seconds: 0.02
"""


@pytest.mark.parametrize("policy", ["dlora", "shepherd"])
@pytest.mark.parametrize("exponent", [0.0, 3.0])
def test_a_whole_cluster_loses_nothing_and_gains_where_one_adapter_prevails(
    tmp_path: Path, policy: str, exponent: float
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(PROFILE)
    work = Workload(
        rate=150.0, burstiness=0.5, prompt_tokens=100, output_tokens=60, limit=600,
        adapters=("x", "y", "z"), zipf_exponent=exponent, slos={"": Slo(e2e_ms=5000)},
    )  # fmt: skip
    ends = {}
    for lora in ("dynamic", "unmerged"):
        world = build(
            Scenario(
                profile=str(path), replicas=3, policy=policy, workload=work,
                batching=Batching(lora=lora),
            )
        )  # fmt: skip
        world.run()
        assert world.recorder.total.completed == 600
        assert not any(r.kv_used or r.running or r.waiting for r in world.replicas.values())
        ends[lora] = world.ended
    assert ends["dynamic"] < (0.95 if exponent else 1.001) * ends["unmerged"]
