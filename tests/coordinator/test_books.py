"""The coordinator's books and verdicts: pure, so each claim is one small test."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.coordinator.checking import verdict
from services.coordinator.settings import BadOptions, CoordinatorSettings
from services.coordinator.telemetry import KEPT, Telemetry
from shared.adapter_files import MAX_RANK
from shared.messages import Finished, StepSample, TrainSample
from shared.quality import after_round, weighted_mean


def step(replica: str, b: int, B: int, seconds: float, **more: object) -> StepSample:
    values: dict[str, object] = {"model": "m", "incarnation": "1", "seq": 1, "time": 1.0}
    return StepSample(replica=replica, b=b, B=B, seconds=seconds, **{**values, **more})  # type: ignore[arg-type]


def train(replica: str, B: int, b: int, seconds: float) -> TrainSample:
    return TrainSample(
        replica=replica, adapter="a", time=1.0, round=1, step=1, B=B, b=b, micro_seconds=seconds
    )


def test_replicas_on_equal_hardware_share_what_they_saw() -> None:
    books = Telemetry()
    books.describe("r0", "host-a")
    books.describe("r1", "host-a")
    books.describe("r2", "host-b")
    for _ in range(5):
        books.step(step("r0", 1, 0, 0.11))
        books.step(step("r1", 8, 0, 0.18))
        books.step(step("r2", 2, 0, 0.5))
        books.step(step("r2", 4, 0, 0.9))
    shared = books.planes("r0", 1.0).model()
    assert shared is not None
    assert shared.alpha1 == pytest.approx(0.01)
    other = books.planes("r2", 1.0).model()
    assert other is not None
    assert other.alpha1 == pytest.approx(0.2)


def test_a_fit_does_for_all_of_its_kind_until_something_new_is_seen() -> None:
    books = Telemetry()
    for name in ("r0", "r1", "other"):
        books.describe(name, "host-b" if name == "other" else "host-a")
        for b in (1, 4):
            books.step(step(name, b, 0, 0.1 + 0.01 * b))
    first = books.planes("r0", 1.0)
    assert books.planes("r1", 2.0) is first, "the same samples"
    assert books.planes("other", 1.0) is not first
    books.describe("r0", "host-a")
    assert books.planes("r0", 3.0) is first, "described as before"
    books.step(step("r1", 8, 0, 0.5))
    second = books.planes("r0", 1.0)
    assert second is not first
    books.train(train("r1", 2, 0, 0.3))
    third = books.planes("r0", 1.0)
    assert (third is not second, third.train is not None) == (True, True)
    books.describe("r1", "host-b")
    fourth = books.planes("r0", 1.0)
    assert fourth.train is None, "it trained on other hardware"
    books.forget("r1")
    assert books.planes("r0", 1.0) is not fourth


def test_serving_without_training_counts_as_seen_on_replicas_of_the_same_hardware() -> None:
    books = Telemetry()
    books.step(step("r0", 2, 4, 0.2))
    assert not books.seen_alone("r0")
    books.step(step("r1", 2, 0, 0.1))
    assert not books.seen_alone("r0")
    books.describe("r0", "cpu")
    books.describe("r1", "cpu")
    assert books.seen_alone("r0")


def test_one_batch_size_makes_no_model_yet() -> None:
    books = Telemetry()
    books.describe("r0", "h")
    books.step(step("r0", 4, 0, 0.1))
    assert books.planes("r0", 1.0).model() is None


def test_merged_steps_count_with_their_mean_and_prefill_with_what_exceeds_decoding() -> None:
    books = Telemetry()
    for b in (1, 4, 8):
        for _ in range(5):
            books.step(step("r0", b, 0, 3 * (0.1 + 0.01 * b), steps=3))
    for tokens in (100, 400):
        seconds = 0.1 + 0.01 * 4 + 0.001 * tokens
        for _ in range(5):
            books.step(step("r0", 5, 0, seconds, prefill_tokens=tokens, decode_tokens=4))
    planes = books.planes("r0", 1.0)
    assert planes.decode is not None
    assert planes.prefill is not None
    assert planes.decode(2, 0) == pytest.approx(0.12)
    assert planes.prefill.slope_x == pytest.approx(0.001, rel=0.01)


def test_training_samples_make_the_third_plane() -> None:
    books = Telemetry()
    for B in (4, 8):
        for b in (0, 2):
            books.train(train("r0", B, b, 0.1 * B + 0.05 * b + 0.2))
    plane = books.planes("r0", 1.0).train
    assert plane is not None
    assert (plane.slope_x, plane.slope_y, plane.fixed) == pytest.approx((0.1, 0.05, 0.2))


def test_lengths_and_rate_come_from_finished_requests() -> None:
    books = Telemetry()
    done = tuple(Finished(f"q{i}", 1, 500, 20, "stop") for i in range(300))
    books.step(step("r0", 1, 0, 0.1, finished=done))
    prompt, output = books.lengths("m")
    assert prompt > 450
    assert output < 30
    assert books.rate("m", 2.0) == pytest.approx(10.0)
    assert books.rate("m", 100.0) == 0.0


def test_finished_requests_are_not_kept_for_ever_if_nobody_asks_for_their_rate() -> None:
    books = Telemetry()
    for second in range(1000):
        done = (Finished(f"q{second}", 1, 10, 10, "stop"),)
        books.step(step("r0", 1, 0, 0.1, time=float(second), finished=done))
    assert len(books._finished["m"]) <= KEPT + 1
    assert books.rate("m", 999.0, 30.0) == pytest.approx(31 / 30)


def test_a_forgotten_replica_leaves_no_samples() -> None:
    books = Telemetry()
    books.describe("r0", "h")
    books.step(step("r0", 4, 0, 0.1))
    books.forget("r0")
    assert books.planes("r0", 1.0).decode is None


@pytest.mark.parametrize(
    ("before", "after", "good"),
    [
        ({"a": 1.0, "b": 2.0}, {"a": 0.9, "b": 1.9}, True),
        ({"a": 1.0, "b": 2.0}, {"a": 1.01, "b": 2.01}, True),  # within the margin
        ({"a": 1.0, "b": 2.0}, {"a": 1.2, "b": 2.2}, False),
        ({"a": 1.0}, {"a": 1.5, "b": 0.1}, False),  # b had no measurement before
        ({}, {"a": 9.0}, True),
        ({}, {}, True),
    ],
)
def test_a_version_is_judged_on_clients_that_measured_both(
    before: dict[str, float], after: dict[str, float], good: bool
) -> None:
    assert verdict(before, after, 0.02).good is good


def test_a_client_that_is_absent_does_not_make_the_reported_loss_jump() -> None:
    whole = verdict({"a": 1.0, "b": 3.0}, {"a": 0.9, "b": 2.9}, 0.02)
    assert (whole.before, whole.after) == (pytest.approx(2.0), pytest.approx(1.9))
    without_b = verdict({"a": 0.9}, {"a": 0.8}, 0.02, {"a": 0.9, "b": 2.9})
    assert (without_b.before, without_b.after) == (pytest.approx(1.9), pytest.approx(1.85))
    worse = verdict({"a": 0.9}, {"a": 1.0}, 0.02, {"a": 0.9, "b": 2.9})
    assert not worse.good, "the absent one has no say"
    nobody = verdict({}, {}, 0.02, {"a": 0.9})
    assert (nobody.good, nobody.before, nobody.after) == (True, None, None)


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0.1, 100))
def test_quality_moves_with_the_loss_and_never_by_more_than_two(
    before: float, after: float, parent: float
) -> None:
    q = after_round(parent, before, after)
    assert parent / 2 <= q <= parent * 2
    if after < before:
        assert q >= parent
    assert after_round(parent, None, after) == after_round(parent, before, None) == parent


def test_a_weighted_mean_leaves_out_what_is_unknown() -> None:
    assert weighted_mean([(1.0, 1), (4.0, 2), (None, 100), (9.0, 0)]) == pytest.approx(3.0)
    assert weighted_mean([(None, 1)]) is None


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"strategy": "fedfoo"}, "fedfoo"),
        ({"rank": 0}, "rank"),
        ({"rank": MAX_RANK + 1}, "rank"),
        ({"noise_multiplier": 1.0}, "clip"),
        ({"client_ranks": "r1=4"}, "client_ranks"),
        ({"stratgy": "ffa"}, "stratgy"),
    ],
)
def test_bad_training_options_name_their_field(
    options: dict[str, str | int | float], word: str
) -> None:
    with pytest.raises(BadOptions, match=word):
        CoordinatorSettings().options(options)


def test_an_adapters_own_options_win_over_the_settings() -> None:
    settings = CoordinatorSettings.model_validate({"training": {"rank": 4, "local_steps": 9}})
    found = settings.options({"rank": "16", "strategy": "flexlora", "client_ranks": "r1=4,r2=8"})
    assert (found.rank, found.local_steps, found.client_ranks) == (16, 9, {"r1": 4, "r2": 8})
