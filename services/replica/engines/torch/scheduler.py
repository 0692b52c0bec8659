"""Which sequences take part in the next step, and with how many tokens. Pure: no tensors.

Iteration-level batching (Orca) with chunked prefill (Sarathi): running sequences decode one
token each, what is left of the step's token budget goes to prompts, by priority, then arrival.
Memory is promised page by page; when it runs out the youngest sequence gives its pages back
and computes them again later (recomputation, vLLM). The oldest is never preempted for a
younger one and new ones enter in order, so every sequence gets to its end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from services.replica.engines.torch.kv import PAGE, PagePool
from services.replica.pace import LEAST_PREFILL


@dataclass(eq=False)
class Sequence:
    """A sequence's tokens and memory. ``computed`` tokens have their KV in ``pages``."""

    id: str
    tokens: list[int]  # prompt, then output
    adapter: int = 0  # identity of the adapter's content; 0 = base
    prompt: int = 0  # tokens of the prompt
    priority: int = 0  # higher enters first
    computed: int = 0
    entered: int = 0  # pages in the prefix index
    reused: int = 0  # prompt tokens whose KV was found
    preempted: int = 0  # times
    pages: list[int] = field(default_factory=list)

    @property
    def decoding(self) -> bool:
        return self.computed == len(self.tokens) - 1 and bool(self.pages)


@dataclass(frozen=True)
class Work:
    """Compute ``count`` tokens of ``sequence`` from ``begin`` on; ``last``: then one is chosen."""

    sequence: Sequence
    begin: int
    count: int
    last: bool


class Scheduler:
    """Waiting and running sequences over a pool of pages."""

    def __init__(self, pool: PagePool, *, b: int, max_step_tokens: int) -> None:
        self.pool = pool
        self.b = b
        self.max_step_tokens = max_step_tokens
        self.beside_decodes = max_step_tokens  # prompt tokens of a step that others wait for
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """It waits behind its equals; what was preempted is not overtaken."""
        at = len(self.waiting)
        while at and self._goes_before(sequence, self.waiting[at - 1]):
            at -= 1
        self.waiting.insert(at, sequence)

    @staticmethod
    def _goes_before(sequence: Sequence, other: Sequence) -> bool:
        return sequence.priority > other.priority and not other.preempted

    def remove(self, sequence: Sequence) -> None:
        """It has ended or was cancelled: its pages are free."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._drop_pages(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Work]:
        """The work of one step; every sequence appears at most once."""
        work = self._decodes()
        budget = max(self.max_step_tokens - len(work), LEAST_PREFILL)
        if work:
            budget = min(budget, max(self.beside_decodes, LEAST_PREFILL))
        for sequence in self.running:
            if budget and not sequence.decoding:
                budget -= self._chunk(sequence, budget, work)
        while budget and self.waiting and len(self.running) < self.b:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            budget -= self._chunk(sequence, budget, work)
        return work

    def _decodes(self) -> list[Work]:
        work = []
        for sequence in list(self.running):
            if not sequence.decoding or sequence not in self.running:
                continue
            if self._grow(sequence):
                work.append(Work(sequence, sequence.computed, 1, True))
        return [w for w in work if w.sequence.pages]

    def _grow(self, sequence: Sequence) -> bool:
        """A page for the next token, from the youngest where none is free."""
        while len(sequence.pages) * PAGE < len(sequence.tokens):
            pages = self.pool.take(1)
            if pages is not None:
                sequence.pages += pages
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._drop_pages(sequence)
        sequence.computed = sequence.entered = 0
        sequence.preempted += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _drop_pages(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []

    def _admit(self, sequence: Sequence) -> bool:
        """Pages for all its tokens and one more to grow into, or it waits."""
        found = self.pool.match(sequence.adapter, sequence.tokens)
        needed = -(-len(sequence.tokens) // PAGE) - len(found)
        growth = 1 if self.running else 0
        if needed + growth + self.pool.evictable(found) > self.pool.available:
            return False
        self.pool.hold(found)
        pages = self.pool.take(needed)
        assert pages is not None
        sequence.pages = found + pages
        sequence.entered = len(found)
        sequence.computed = len(found) * PAGE
        if not sequence.preempted:
            sequence.reused = min(sequence.computed, sequence.prompt)
        return True

    def _chunk(self, sequence: Sequence, budget: int, work: list[Work]) -> int:
        left = len(sequence.tokens) - sequence.computed
        count = min(left, budget)
        work.append(Work(sequence, sequence.computed, count, count == left))
        return count

    def computed(self, work: list[Work]) -> None:
        """The step has been computed: note it, and let full pages be used by others."""
        for item in work:
            sequence = item.sequence
            sequence.computed = item.begin + item.count
            while (sequence.entered + 1) * PAGE <= sequence.computed:
                self.pool.enter(sequence.adapter, sequence.pages, sequence.entered, sequence.tokens)
                sequence.entered += 1
