"""The engine's promises to the serving loop, on a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.replica.engines.base import Rejected
from services.replica.engines.torch import TorchEngine
from shared.lifetime import Stamp
from shared.messages import Sampling
from tests.engine.helpers import load, prompts, request, run, tokens


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[TorchEngine]:
    engine = load(tiny_model)
    yield engine
    engine.close()


def test_outputs_carry_offsets_and_the_last_one_carries_the_life_stamps(
    engine: TorchEngine,
) -> None:
    parts = run(engine, [request("a", [5, 6, 7], 4)])["a"]
    assert [p.offset for p in parts] == [0, 1, 2, 3]
    assert [p.finish for p in parts] == [None, None, None, "length"]
    stamps = parts[-1].stamps
    assert stamps[Stamp.STARTED] <= stamps[Stamp.FIRST_TOKEN] <= stamps[Stamp.FINISHED]
    assert parts[0].stamps == {}


def test_a_stop_token_ends_its_own_request_only(engine: TorchEngine) -> None:
    """One request's stop must not end the batch."""
    free = tokens(run(engine, [request("a", [5, 6, 7], 12)]))["a"]
    stop = free[3]
    both = run(engine, [request("a", [5, 6, 7], 12, stops=(stop,)), request("b", [5, 6, 7], 12)])
    assert both["a"][-1].finish == "stop"
    assert tokens(both)["a"] == free[: free.index(stop) + 1]
    assert tokens(both)["b"] == free


def test_a_continuation_goes_on_where_the_first_attempt_was_lost(engine: TorchEngine) -> None:
    whole = tokens(run(engine, [request("a", [9, 8, 7], 10)]))["a"]
    rest = run(engine, [request("a", [9, 8, 7], 10, generated=tuple(whole[:4]), attempt=2)])["a"]
    assert [t for o in rest for t in o.tokens] == whole[4:]
    assert rest[0].offset == 4
    assert rest[0].attempt == 2


def test_a_seeded_continuation_draws_what_the_first_attempt_would_have_drawn(
    engine: TorchEngine,
) -> None:
    sampling = Sampling(max_tokens=10, temperature=1.5)
    whole = tokens(run(engine, [request("a", [9, 8, 7], sampling=sampling)]))["a"]
    rest = run(engine, [request("a", [9, 8, 7], sampling=sampling, generated=tuple(whole[:4]))])
    assert tokens(rest)["a"] == whole[4:]


def test_cancelled_requests_free_their_memory_and_are_reported_once(engine: TorchEngine) -> None:
    engine.submit(request("a", prompts(1)[0], 50))
    engine.submit(request("b", [4, 5], 2))
    engine.step_now()
    assert engine.cancel("a")
    assert not engine.cancel("a")
    finished = []
    while engine.has_work():
        finished += engine.step_now().finished
    assert [(f.id, f.reason) for f in finished] == [("a", "cancelled"), ("b", "length")]
    assert all(0 < f.started <= f.first_token for f in finished), "their moments are told"
    assert engine.status().kv_used == 0


def test_memory_pressure_preempts_and_changes_no_answer(tiny_model: Path) -> None:
    questions = prompts(12, seed=3)
    roomy, tight = load(tiny_model), load(tiny_model, kv_tokens=256)
    requests = [request(str(i), p, 60) for i, p in enumerate(questions)]
    assert tokens(run(tight, requests)) == tokens(run(roomy, requests))
    assert tight.status().kv_used == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [5000]}, "token ids run from 0 to 258"),
        ({"prompt": [3] * 500, "max_tokens": 20}, "context of 512"),
        ({"prompt": [3], "adapter": "typo"}, "adapter 'typo' is not loaded"),
        ({"prompt": [3], "max_tokens": 2, "generated": (4, 5)}, "nothing is left"),
    ],
)
def test_what_can_never_be_served_is_refused(
    engine: TorchEngine, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(Rejected, match=message):
        engine.submit(request("a", **changes))  # type: ignore[arg-type]
    assert not engine.has_work()


def test_a_request_larger_than_the_memory_is_refused_not_queued(tiny_model: Path) -> None:
    engine = load(tiny_model, kv_tokens=64)
    with pytest.raises(Rejected, match="never fit"):
        engine.submit(request("a", [3] * 60, 20))


def test_the_concurrency_limit_changes_live(engine: TorchEngine) -> None:
    engine.configure(b=2)
    for i in range(6):
        engine.submit(request(str(i), [5, 6], 8))
    assert engine.step_now().b == 2
    engine.configure(b=5)
    assert engine.step_now().b == 5
    with pytest.raises(ValueError, match="from 1 to 64"):
        engine.configure(b=0)


def test_a_known_prefix_is_reused_and_changes_no_answer(tiny_model: Path) -> None:
    prompt = list(range(3, 150))
    fresh, reusing = load(tiny_model, prefix_cache=False), load(tiny_model)
    want = tokens(run(fresh, [request("a", prompt)]))["a"]
    assert tokens(run(reusing, [request("a", prompt)]))["a"] == want
    again = run(reusing, [request("b", prompt)])
    assert tokens(again)["b"] == want
    assert again["b"][-1].cached_tokens == 128
    longer = run(reusing, [request("c", [*prompt, *want, 7])])["c"]
    assert longer[-1].cached_tokens == 160, "the answer's own pages serve the next turn"


def test_a_short_step_time_makes_small_chunks_beside_decodes(tiny_model: Path) -> None:
    engine = load(tiny_model, step_seconds=1e-9)
    engine.submit(request("a", [5] * 30, 40))
    engine.step_now()
    engine.submit(request("b", [6] * 100, 2))
    report = engine.step_now()
    assert (report.decode_tokens, report.prefill_tokens) == (1, 16)
    engine.close()


async def test_step_runs_beside_the_event_loop(engine: TorchEngine) -> None:
    engine.submit(request("a", [5, 6], 3))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while engine.has_work():
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    while engine.has_work():
        await engine.step()
    await counting
    assert turns > 3


def test_a_step_reports_what_it_did(engine: TorchEngine) -> None:
    engine.submit(request("a", [5] * 100, 3))
    reports = []
    while engine.has_work():
        reports.append(engine.step_now())
    assert [(r.prefill_tokens, r.decode_tokens, r.b) for r in reports] == [
        (64, 0, 1),
        (36, 0, 1),
        (0, 1, 1),
        (0, 1, 1),
    ]
    assert all(r.seconds > 0 for r in reports)
    assert [f.output_tokens for r in reports for f in r.finished] == [3]
