"""A simulated replica against a plain iteration-by-iteration account of the same batching."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dispatcher.policies.base import Request
from shared.latency import LatencyModel
from shared.profile import Profile
from shared.slo import Slo
from sim.job import Job
from sim.replica import Batching, Replica

LATENCY = LatencyModel(alpha0=0.01, alpha1=0.001, pi0=0.002, pi1=0.0001)


def profile(**changes: object) -> Profile:
    values = {"name": "p", "source": "test", "coefficients": LATENCY, "kv_tokens": 10_000}
    return Profile(**{**values, **changes})  # type: ignore[arg-type]


def job(name: str, prompt: int, output: int, adapter: str | None = None) -> Job:
    request = Request(
        id=name, arrival=0.0, prompt_tokens=prompt, max_tokens=output, adapter=adapter
    )
    return Job(request, output, "", Slo(), 0.0)


def drive(replica: Replica, arrivals: list[tuple[float, Job]]) -> dict[str, float]:
    """Feed releases at their times, run turns in between; returns id -> time of last token."""
    ended: dict[str, float] = {}
    turn: float | None = None
    waiting = sorted(arrivals, key=lambda a: a[0])
    while waiting or turn is not None:
        if waiting and (turn is None or waiting[0][0] <= turn + 1e-9):
            time, one = waiting.pop(0)
            changed = replica.accept([one], time)
            turn = changed if changed is not None else turn
            continue
        assert turn is not None
        for done in replica.complete(turn):
            ended[done.request.id] = turn
        turn = replica.plan(turn)
    return ended


def chunked(prefill: dict[str, int], budget: int) -> dict[str, int]:
    chunks: dict[str, int] = {}
    for name, tokens in prefill.items():
        if budget > 0:
            chunks[name] = min(tokens, budget)
            budget -= chunks[name]
    return chunks


def stepwise(
    latency: LatencyModel, arrivals: list[tuple[float, Job]], b: int, room: int, kv: int
) -> dict[str, float]:
    """The same engine, one iteration at a time: the definition that spans must reproduce."""
    waiting = sorted(arrivals, key=lambda a: a[0])
    queue: list[Job] = []
    prefill: dict[str, int] = {}
    left: dict[str, int] = {}
    jobs = {one.request.id: one for _, one in arrivals}
    now, used = 0.0, 0
    ended: dict[str, float] = {}
    while len(ended) < len(jobs):
        while waiting and waiting[0][0] <= now + 1e-9:
            queue.append(waiting.pop(0)[1])
        while queue and len(prefill) + len(left) < b and used + queue[0].kv <= kv:
            one = queue.pop(0)
            used += one.kv
            prefill[one.request.id] = one.request.prompt_tokens
        if not prefill and not left:
            now = waiting[0][0]
            continue
        chunks = chunked(prefill, room - len(left))
        now += latency.t_infer(len(left)) if left else 0.0
        now += latency.t_prefill(sum(chunks.values())) if chunks else 0.0
        for name in list(left):
            left[name] -= 1
        for name, tokens in chunks.items():
            prefill[name] -= tokens
            if not prefill[name]:
                del prefill[name]
                left[name] = jobs[name].output - 1
        for name in [n for n, tokens in left.items() if tokens <= 0]:
            del left[name]
            used -= jobs[name].kv
            ended[name] = now
    return ended


cases = st.lists(
    st.tuples(st.floats(0, 3, allow_nan=False), st.integers(1, 1500), st.integers(1, 60)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(cases, st.integers(1, 6))
def test_spans_give_the_times_of_single_iterations(
    case: list[tuple[float, int, int]], b: int
) -> None:
    def arrivals() -> list[tuple[float, Job]]:
        return [(round(t, 3), job(str(k), p, n)) for k, (t, p, n) in enumerate(case)]

    replica = Replica("r", "r0", profile(), Batching(), b, 0)
    spans = drive(replica, arrivals())
    single = stepwise(LATENCY, arrivals(), b, 512, 10_000)
    assert spans.keys() == single.keys()
    for name, time in single.items():
        assert spans[name] == pytest.approx(time, abs=1e-6)
    assert replica.kv_used == 0
    assert replica.running == 0


def test_static_batches_start_only_when_the_last_one_ended() -> None:
    replica = Replica("r", "r0", profile(), Batching(batching="static"), 8, 0)
    ended = drive(replica, [(0.0, job("a", 100, 50)), (0.1, job("b", 100, 2))])
    assert ended["b"] > ended["a"]


def test_a_static_batch_answers_all_at_once_and_computes_finished_rows_to_the_end() -> None:
    replica = Replica("r", "r0", profile(), Batching(batching="static"), 8, 0)
    jobs = [job("a", 100, 50), job("b", 100, 2)]
    turn = replica.accept(jobs, 0.0)
    ended: dict[str, float] = {}
    while turn is not None:
        ended |= {j.request.id: turn for j in replica.complete(turn)}
        turn = replica.plan(turn)
    assert ended["a"] == ended["b"]
    assert jobs[1].first_token == ended["b"]
    assert ended["a"] == pytest.approx(LATENCY.t_prefill(200) + 49 * LATENCY.t_infer(2))


def test_merged_adapters_run_one_at_a_time_and_pay_for_the_switch() -> None:
    fast = profile(merged_speedup=2.0, merge_seconds=0.5)
    replica = Replica("r", "r0", fast, Batching(lora="merged"), 8, 0)
    ended = drive(
        replica,
        [(0.0, job("a", 10, 20, "x")), (0.0, job("b", 10, 20, "y")), (0.0, job("c", 10, 20, "x"))],
    )
    assert ended["a"] < ended["b"]
    assert ended["c"] < ended["b"]
    assert ended["b"] > 1.0  # two switches of half a second


def test_kv_memory_bounds_what_runs_together() -> None:
    replica = Replica("r", "r0", profile(kv_tokens=250), Batching(), 8, 0)
    jobs = [job(str(k), 100, 20) for k in range(4)]
    peak = 0
    turn: float | None = replica.accept(jobs, 0.0)
    while turn is not None:
        replica.complete(turn)
        turn = replica.plan(turn)
        peak = max(peak, replica.running)
        assert replica.kv_used <= 250
    assert peak == 2


def test_preempted_requests_leave_at_once_and_free_their_memory() -> None:
    replica = Replica("r", "r0", profile(), Batching(), 8, 0)
    turn = replica.accept([job("a", 100, 50), job("b", 100, 50)], 0.0)
    for _ in range(2):
        assert turn is not None
        replica.complete(turn)
        turn = replica.plan(turn)
    assert [j.request.id for j in replica.take_back({"a"})] == ["a"]
    assert replica.kv_used == 150
    ended: list[str] = []
    while turn is not None:
        ended += [j.request.id for j in replica.complete(turn)]
        turn = replica.plan(turn)
    assert ended == ["b"]


def test_jitter_keeps_the_mean() -> None:
    noisy = profile(jitter=0.2)
    totals = []
    for seed in range(200):
        replica = Replica("r", "r0", noisy, Batching(), 1, seed)
        totals.append(drive(replica, [(0.0, job("a", 10, 30))])["a"])
    quiet = drive(Replica("r", "r0", profile(), Batching(), 1, 0), [(0.0, job("a", 10, 30))])["a"]
    mean = sum(totals) / len(totals)
    assert mean == pytest.approx(quiet * 1.0202, rel=0.02)  # exp(cv^2 / 2)
    assert len({round(t, 9) for t in itertools.islice(totals, 20)}) > 1


@pytest.mark.parametrize(("step_seconds", "steps"), [(None, 2), (0.02, 3), (0.1, 2), (0.061, 2)])
def test_prompts_beside_decodes_keep_to_the_longest_step(
    step_seconds: float | None, steps: int
) -> None:
    """900 tokens beside one decode of 11 ms: 512 a step, or what 44 ms (four times 11) leave."""
    batching = Batching(jitter=False, step_seconds=step_seconds)
    replica = Replica("r", "r", profile(), batching, 8, seed=0)
    ended = drive(replica, [(0.0, job("long", 1, 40)), (0.001, job("prompt", 900, 1))])
    first = 0.002 + 0.0001  # the first one's own prompt
    assert ended["prompt"] == pytest.approx(first + steps * 0.013 + 0.09)
