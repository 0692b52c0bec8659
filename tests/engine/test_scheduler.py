"""The scheduler under random load: memory, order, and every token accounted for."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.replica.engines.torch.kv import PAGE, PagePool
from services.replica.engines.torch.scheduler import LEAST_PREFILL, Scheduler, Sequence, Work


class Load:
    """Sequences with known ends, driven as the engine drives the scheduler."""

    def __init__(self, scheduler: Scheduler, wanted: list[tuple[int, int]], same: bool) -> None:
        self.scheduler = scheduler
        self.left: dict[str, int] = {}
        self.made: Counter[str] = Counter()
        self.order: list[str] = []
        for i, (prompt, output) in enumerate(wanted):
            tokens = [1] * prompt if same else [i] * prompt
            scheduler.add(Sequence(str(i), tokens, prompt=prompt))
            self.left[str(i)] = output

    def step(self) -> list[Work]:
        work = self.scheduler.schedule()
        self.scheduler.computed(work)
        for item in work:
            if item.last:
                sequence = item.sequence
                sequence.tokens.append(7)
                self.made[sequence.id] += 1
                if self.made[sequence.id] == self.left[sequence.id]:
                    self.scheduler.remove(sequence)
                    self.order.append(sequence.id)
        return work


sizes = st.lists(st.tuples(st.integers(1, 150), st.integers(1, 90)), min_size=1, max_size=12)


def drive(load: Load, pool: PagePool, limit: int) -> None:
    """Every step keeps the books right; all sequences end."""
    scheduler = load.scheduler
    for _ in range(20_000):
        if not scheduler.running and not scheduler.waiting:
            break
        running = len(scheduler.running)
        work = load.step()
        assert work, "sequences are left, but no step has work"
        assert len({w.sequence.id for w in work}) == len(work)
        decodes = sum(w.count == 1 and w.last for w in work)
        assert sum(w.count for w in work) <= max(limit, decodes + LEAST_PREFILL)
        holders = Counter(p for s in scheduler.running for p in s.pages)
        assert len(holders) <= pool.pages
        assert pool.held == len(holders)
        assert pool.held + pool.available == pool.pages
        for sequence in scheduler.running:
            assert sequence.computed <= len(sequence.pages) * PAGE
            assert len(set(sequence.pages)) == len(sequence.pages)
        assert len(scheduler.running) <= max(scheduler.b, running)
    assert load.made == load.left
    assert pool.held == 0


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(8, 20), st.integers(1, 6), st.integers(16, 100), st.booleans())
def test_every_sequence_ends_and_memory_is_never_over_committed(
    wanted: list[tuple[int, int]], pages: int, b: int, limit: int, same: bool
) -> None:
    pool = PagePool(pages)
    scheduler = Scheduler(pool, b=b, max_step_tokens=limit)
    drive(Load(scheduler, wanted, same), pool, limit)


@settings(max_examples=30, deadline=None)
@given(sizes, st.integers(8, 12))
def test_without_reuse_it_is_the_same(wanted: list[tuple[int, int]], pages: int) -> None:
    pool = PagePool(pages, reuse=False)
    scheduler = Scheduler(pool, b=8, max_step_tokens=64)
    drive(Load(scheduler, wanted, same=True), pool, 64)


def test_a_long_prompt_does_not_hold_up_running_decodes() -> None:
    scheduler = Scheduler(PagePool(100), b=4, max_step_tokens=64)
    short, long = Sequence("short", [1] * 10, prompt=10), Sequence("long", [2] * 500, prompt=500)
    scheduler.add(short)
    scheduler.computed(scheduler.schedule())
    short.tokens.append(5)
    scheduler.add(long)
    for _ in range(3):
        work = scheduler.schedule()
        assert [(w.sequence.id, w.count) for w in work] == [("short", 1), ("long", 63)]
        scheduler.computed(work)
        short.tokens.append(5)


def test_chunks_beside_decodes_keep_to_the_step_time_and_alone_they_need_not() -> None:
    scheduler = Scheduler(PagePool(100), b=4, max_step_tokens=128)
    scheduler.beside_decodes = 40
    long = Sequence("long", [2] * 300, prompt=300)
    scheduler.add(long)
    (alone,) = scheduler.schedule()
    assert alone.count == 128
    scheduler.computed([alone])
    short = Sequence("short", [1] * 10, prompt=10)
    scheduler.running.insert(0, short)
    short.pages, short.computed = [99], 9
    assert [w.count for w in scheduler.schedule()] == [1, 40]


def test_the_youngest_is_preempted_and_computed_again() -> None:
    pool = PagePool(4, reuse=False)
    scheduler = Scheduler(pool, b=2, max_step_tokens=256)
    old, young = Sequence("old", [1] * 40, prompt=40), Sequence("young", [2] * 30, prompt=30)
    scheduler.add(old)
    scheduler.computed(scheduler.schedule())
    old.tokens.append(3)
    scheduler.add(young)
    while not young.preempted:
        work = scheduler.schedule()
        scheduler.computed(work)
        for item in work:
            item.sequence.tokens.append(3)
    assert young in scheduler.waiting
    assert old in scheduler.running
    assert young.computed == 0


def test_a_lower_limit_drops_no_running_sequence() -> None:
    scheduler = Scheduler(PagePool(100), b=4, max_step_tokens=256)
    for i in range(4):
        scheduler.add(Sequence(str(i), [i] * 10, prompt=10))
    scheduler.computed(scheduler.schedule())
    scheduler.b = 1
    for sequence in scheduler.running:
        sequence.tokens.append(1)
    assert len(scheduler.schedule()) == 4


def test_pages_of_a_known_prefix_are_used_again_up_to_the_last_token() -> None:
    pool = PagePool(10)
    scheduler = Scheduler(pool, b=4, max_step_tokens=256)
    first = Sequence("first", list(range(96)), prompt=96)
    scheduler.add(first)
    scheduler.computed(scheduler.schedule())
    scheduler.remove(first)
    second = Sequence("second", list(range(96)), prompt=96)
    scheduler.add(second)
    (work,) = scheduler.schedule()
    assert (work.begin, work.count) == (64, 32)
    assert second.reused == 64
    other = Sequence("other adapter", list(range(96)), adapter=5, prompt=96)
    scheduler.add(other)
    assert scheduler.schedule()[-1].begin == 0


def test_priority_goes_before_arrival_but_not_before_what_was_preempted() -> None:
    scheduler = Scheduler(PagePool(64, reuse=False), b=1, max_step_tokens=64)
    first = Sequence("first", [1] * 4, prompt=4)
    first.preempted = 1
    scheduler.add(first)
    for name, priority in (("a", 0), ("b", 2), ("c", 1), ("d", 2)):
        scheduler.add(Sequence(name, [1] * 4, prompt=4, priority=priority))
    assert [s.id for s in scheduler.waiting] == ["first", "b", "d", "c", "a"]
