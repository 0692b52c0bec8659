"""The emulated engine by itself: batching, memory, time, baselines."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.replica.engines import emulated_text
from services.replica.engines.base import Rejected, StepReport
from services.replica.engines.emulated import EmulatedEngine, Options
from shared.latency import LatencyModel
from shared.messages import Generate, Sampling
from shared.profile import Profile
from shared.records import ModelCard
from tests.replica.harness import generate

CARD = ModelCard(name="m", path="", context=4096, vocabulary=259, engine="emulated")


def engine(
    *,
    b: int = 4,
    kv: int = 4096,
    seconds: float = 0.0,
    profile: dict[str, Any] | None = None,
    **options: Any,
) -> EmulatedEngine:
    model = LatencyModel(alpha0=seconds, pi0=seconds)
    values = {"name": "t", "source": "test", "coefficients": model, **(profile or {})}
    return EmulatedEngine(
        CARD,
        Profile(**values),
        words=tuple(range(100, 150)),
        b_max=b,
        kv_tokens=kv,
        options=Options(**options),
        now=time.time,
    )


async def run_out(made: EmulatedEngine) -> list[StepReport]:
    reports = []
    while made.has_work():
        reports.append(await made.step())
    return reports


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12),
    b=st.integers(1, 5),
    kv=st.integers(80, 200),
    batching=st.sampled_from(["continuous", "static"]),
)
def test_every_request_ends_and_no_limit_is_ever_exceeded(
    requests: list[tuple[int, int]], b: int, kv: int, batching: str
) -> None:
    made = engine(b=b, kv=kv, batching=batching, max_step_tokens=16)
    for i, (prompt, tokens) in enumerate(requests):
        made.submit(generate(str(i), prompt=tuple([5] * prompt), tokens=tokens))

    async def drive() -> dict[str, int]:
        counts: dict[str, int] = {}
        while made.has_work():
            report = await made.step()
            status = made.status()
            assert status.running <= b
            assert 0 <= status.kv_used <= kv
            if batching == "continuous":
                assert report.prefill_tokens + report.decode_tokens <= max(16, b)
            for _, output in report.outputs:
                assert output.offset == counts.get(output.id, 0)
                counts[output.id] = output.offset + 1
        return counts

    assert asyncio.run(drive()) == {str(i): n for i, (_, n) in enumerate(requests)}
    assert made.status().kv_used == 0


async def test_a_request_joins_while_others_run() -> None:
    made = engine()
    made.submit(generate("a", tokens=10))
    await made.step()
    made.submit(generate("b", tokens=2))
    reports = await run_out(made)
    finished = [f for r in reports for f in r.finished]
    assert [f.id for f in finished] == ["b", "a"]
    assert all(0 < f.started <= f.first_token for f in finished), "their moments are told"
    assert finished[1].started < finished[0].started, "a began before b came"


async def test_a_static_batch_answers_at_its_end_and_lets_nobody_in() -> None:
    made = engine(batching="static")
    made.submit(generate("short", tokens=2))
    made.submit(generate("long", tokens=6))
    await made.step()
    made.submit(generate("late", tokens=1))
    reports = await run_out(made)
    ends = [[f.id for f in r.finished] for r in reports if r.finished]
    assert ends == [["short", "long"], ["late"]]
    assert all(not r.outputs for r in reports if not r.finished)


async def test_a_long_prompt_is_prefilled_in_chunks_beside_decodes() -> None:
    made = engine(max_step_tokens=16)
    made.submit(generate("a", tokens=10))
    await made.step()
    made.submit(generate("b", prompt=tuple([7] * 40), tokens=1))
    report = await made.step()
    assert report.decode_tokens == 1
    assert report.prefill_tokens == 15


async def test_what_does_not_fit_now_waits_and_what_never_fits_is_refused() -> None:
    made = engine(kv=100)
    made.submit(generate("a", tokens=80))
    made.submit(generate("b", tokens=80))
    await made.step()
    assert (made.status().running, made.status().waiting) == (1, 1)
    with pytest.raises(Rejected, match="exceed"):
        made.submit(generate("c", tokens=200))


async def test_steps_take_the_profiles_time_on_an_absolute_schedule() -> None:
    made = engine(seconds=0.01)
    made.submit(generate("a", tokens=20))
    reports = await run_out(made)
    assert sum(r.seconds for r in reports) == pytest.approx(0.2)


async def test_a_time_scale_shortens_real_time() -> None:
    made = engine(seconds=1.0, time_scale=1000.0)
    made.submit(generate("a", tokens=5))
    reports = await run_out(made)
    assert sum(r.seconds for r in reports) == pytest.approx(0.005)


async def test_a_merged_engine_serves_one_adapter_at_a_time_and_pays_the_switch() -> None:
    made = engine(lora="merged", profile={"merge_seconds": 0.005, "merged_speedup": 2.0})
    for name in ("x", "y"):
        made.load_adapter(name, "1", "")
    for i, name in enumerate(("x", "y", "x")):
        made.submit(generate(str(i), adapter=name, tokens=3))
    reports = await run_out(made)
    assert [f.id for r in reports for f in r.finished] == ["0", "2", "1"]
    assert sum(r.seconds for r in reports) == pytest.approx(2 * 0.005)


async def test_an_adapter_that_was_moved_out_costs_its_fetch_again() -> None:
    made = engine(b=1, profile={"adapter_seconds": 0.004, "adapter_slots": 1})
    for name in ("x", "y"):
        made.load_adapter(name, "1", "")
    for i, name in enumerate(("x", "x", "y", "x")):
        made.submit(generate(str(i), adapter=name, tokens=1))
    reports = await run_out(made)
    assert sum(r.seconds for r in reports) == pytest.approx(3 * 0.004)


async def test_a_pinned_version_is_served_beside_the_current_one() -> None:
    made = engine()
    made.load_adapter("x", "2", "")
    made.load_adapter("x", "1", "", current=False)
    made.submit(generate("a", adapter="x", tokens=1))
    made.submit(generate("b", adapter="x", adapter_version="1", tokens=1))
    versions = {o.id: o.adapter_version for r in await run_out(made) for _, o in r.outputs}
    assert versions == {"a": "2", "b": "1"}


def test_lengths_are_drawn_around_the_mean_and_the_same_in_every_attempt() -> None:
    sampling = Sampling(max_tokens=10_000)
    lengths = [
        emulated_text.length(generate(f"r{i}", sampling=sampling), 50.0, 0) for i in range(2000)
    ]
    assert 45 < sum(lengths) / len(lengths) < 55
    again: Generate = generate("r7", sampling=sampling, attempt=2)
    assert emulated_text.length(again, 50.0, 0) == lengths[7]


def test_words_are_plain_letters_of_the_tokenizer(tiny_folder: Path) -> None:
    from tokenizers import Tokenizer

    ids = emulated_text.printable(tiny_folder, 259)
    text = Tokenizer.from_file(str(tiny_folder / "tokenizer.json")).decode(list(ids))
    assert text.isascii()
    assert text.isalpha()


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(emulated_text.VocabularyError, match=r"tokenizer\.json"):
        emulated_text.printable(tmp_path, 259)
