"""PEFT: how Transformers + PEFT serves: static batches, first come first served, run to the end.

The baseline of the CoLLM paper (arXiv 2604.16400). A replica takes up to ``batch`` requests when
it is empty and nothing more until the last of them is done; replicas in turn. Deadlines play no
part and it never trains. With the emulated engine's ``static`` batching the members also start
together (padded prefill, no early leaving); with a continuous engine only the admission is static.
"""

from __future__ import annotations

from services.dispatcher.policies.base import Request
from services.dispatcher.policies.fcfs import FirstCome
from services.dispatcher.policies.fleet import Member


class Peft(FirstCome):
    name = "peft"

    def __init__(self, *, batch: int = 8) -> None:
        super().__init__()
        self._batch = batch
        self._open: set[str] = set()  # replicas whose batch is being put together in this decision

    def _fill(self, free: list[Member]) -> dict[str, list[Request]]:
        self._open = {m.view.id for m in free if m.load == 0}
        return super()._fill([m for m in free if m.view.id in self._open])

    def choose(self, request: Request, candidates: list[Member]) -> Member:
        """Fill the batch of one replica before the next one's is begun."""
        return max(candidates, key=lambda m: m.load)

    def _candidates(self, request: Request, free: list[Member]) -> list[Member]:
        fitting = super()._candidates(request, free)
        return [m for m in fitting if m.load < min(self._batch, m.view.b_limit)]
