"""What passes between dispatcher, replicas and training: preemption, delays, suspension."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.dispatcher.policies.base import Suspend
from services.dispatcher.policies.fcfs import FirstCome
from services.dispatcher.policies.shepherd import Shepherd
from services.launcher.terms import Options
from shared.slo import Slo
from sim.job import Job
from sim.replica import Batching
from sim.rounds import Federated
from sim.scenario import Scenario, build, run
from sim.workload import Workload
from sim.world import Delays, World

PROFILE = """
name: small
source: test
coefficients: {{alpha0: 0.01, alpha1: 0.0005, alpha2: {alpha2}, pi0: 0.002, pi1: 0.0005,
  pi2: {alpha2}, gamma0: 0.05, gamma1: 0.02, gamma2: 0.001}}
b_max: {b_max}
kv_tokens: 60000
context: 4096
load_seconds: {load}
"""
QUICK = Options(t0=5, t_min=3, t_max=10, t_back0=10)


def scenario(
    folder: Path,
    work: Workload,
    alpha2: float = 0.001,
    load: float = 0.0,
    b_max: int = 16,
    **changes: Any,
) -> Scenario:
    path = folder / "small.yaml"
    path.write_text(PROFILE.format(alpha2=alpha2, load=load, b_max=b_max))
    values = {"profile": str(path), "replicas": 2, "policy": "least_loaded", "workload": work}
    return Scenario(**{**values, **changes})


def started(world: World) -> dict[str, Job]:
    """Run to the end; every job that entered, by its request's id."""
    seen: dict[str, Job] = {}
    original = world.enter

    def enter(job: Job) -> bool:
        seen[job.request.id] = job
        return original(job)

    world.enter = enter  # type: ignore[method-assign]
    world.run()
    return seen


def test_what_shepherd_takes_back_is_served_and_leaves_nothing_behind(tmp_path: Path) -> None:
    work = Workload(
        rate=8.0, burstiness=0.2, prompt_tokens=300, output_tokens=20, limit=400,
        slos={"": Slo(e2e_ms=3000)}, seed=3,
    )  # fmt: skip
    world = build(scenario(tmp_path, work, policy="shepherd", policy_options={"preempt": 1.2}))
    world.run()
    assert world.preempted > 20, "the case preempts next to nothing"
    total = world.recorder.total
    assert (total.completed, total.unfinished) == (400, 0)
    assert isinstance(world.policy, Shepherd)
    assert [member.load for member in world.policy.fleet.dispatchable()] == [0, 0]
    assert not any(replica.kv_used for replica in world.replicas.values())


def test_what_dlora_moves_is_served_too(tmp_path: Path) -> None:
    """Long answers meet on one replica, short ones on the other, which then is empty."""
    path = tmp_path / "t.csv"
    lines = [f"2024-05-10 00:00:00.{k:03}000+00:00,10,{(800, 2)[k % 2]}\n" for k in range(124)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    work = Workload(traces=(("t", path),))
    world = build(scenario(tmp_path, work, policy="dlora", b_max=64))
    world.run()
    assert world.preempted > 0, "the case moves nothing"
    assert world.recorder.total.completed == 124
    assert isinstance(world.policy, FirstCome)
    assert [member.load for member in world.policy.fleet.dispatchable()] == [0, 0]


def test_each_release_takes_its_way_to_the_replica_once(tmp_path: Path) -> None:
    """Later releases put the start of earlier ones off when a release moved the replica's turn."""
    path = tmp_path / "t.csv"
    lines = [f"2024-05-10 00:00:00.{ms:03}000+00:00,10,50\n" for ms in (0, 50, 99)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    work = Workload(traces=(("t", path),))
    world = build(
        scenario(
            tmp_path, work, replicas=1, delays=Delays(request=0.0, release=0.1),
            batching=Batching(jitter=False),
        )
    )  # fmt: skip
    first, *later = started(world).values()
    assert first.started == pytest.approx(first.received + 0.1)
    for job in later:
        assert job.started >= job.received + 0.1 - 1e-9, "it began before it was there"
        assert job.started <= job.received + 0.1 + 0.05, "it waited longer than an iteration"


@pytest.mark.parametrize("slo", [Slo(tpot_ms=30), Slo(ttft_ms=150), Slo(e2e_ms=1000)])
def test_training_gives_way_to_every_kind_of_limit(tmp_path: Path, slo: Slo) -> None:
    work = Workload(
        rate=0.5, prompt_tokens=80, output_tokens=40, duration=300.0, slos={"": slo}, seed=1
    )
    attainment = {}
    for yields in (True, False):
        federated = Federated(launcher=QUICK, local_steps=20, yielding=yields)
        result = run(scenario(tmp_path, work, alpha2=0.05, replicas=3, federated=federated))
        assert result["training"]["samples"] > 0
        attainment[yields] = result["slo_attainment"]
    assert attainment[True] > 0.93
    assert attainment[False] < attainment[True] - 0.03


def test_a_client_that_was_suspended_ends_its_round_when_it_has_done_its_steps(
    tmp_path: Path,
) -> None:
    work = Workload(rate=0.2, prompt_tokens=50, output_tokens=5, duration=300.0)
    federated = Federated(launcher=QUICK, local_steps=5, max_rounds=1)
    world = build(scenario(tmp_path, work, federated=federated))
    assert world.federation is not None
    rounds = world.federation.rounds
    while rounds.session is None:
        world.kernel.run(world, 1)
    clients, opened = tuple(rounds.session.clients), world.kernel.now
    targets = {name: _trainer(world, name).target for name in clients}
    _suspend(world, clients, wanted=True)
    while world.kernel.now < opened + 20.0:
        world.kernel.run(world, 1)
    assert rounds.ended == 0
    _suspend(world, clients, wanted=False)
    while rounds.ended == 0:
        world.kernel.run(world, 1)
    assert world.kernel.now < opened + 200.0, "forgotten until the round's deadline"
    assert rounds.micro_steps == pytest.approx(sum(targets.values()))


def _trainer(world: World, name: str) -> Any:
    return world.replicas[name].trainer


def _suspend(world: World, clients: tuple[str, ...], *, wanted: bool) -> None:
    world._suspend(Suspend(replicas=clients, wanted=wanted))


def test_the_isolated_design_waits_for_its_copy_of_the_base(tmp_path: Path) -> None:
    work = Workload(rate=1.0, prompt_tokens=50, output_tokens=5, duration=300.0)
    options = Federated(launcher=QUICK, dedicated=1, publish_at_end=True, local_steps=2,
                        max_rounds=2)  # fmt: skip
    samples = {}
    for load in (0.0, 250.0):
        made = scenario(
            tmp_path, work, load=load, policy="split", policy_options={"serving": 1},
            federated=options,
        )  # fmt: skip
        samples[load] = run(made)["training"]["samples"]
    assert 0 < samples[250.0] < 0.4 * samples[0.0]


def test_decodes_that_fill_a_step_leave_prompts_for_later(tmp_path: Path) -> None:
    work = Workload(rate=500.0, prompt_tokens=6, output_tokens=30, limit=60)
    batching = Batching(max_step_tokens=4, jitter=False)
    result = run(scenario(tmp_path, work, batching=batching))
    assert (result["completed"], result["failed"]) == (60, 0)
