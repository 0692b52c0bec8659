"""Static batching in the emulated engine: a batch answers when its last member is done."""

from __future__ import annotations

from shared.lifetime import Stamp
from shared.messages import Finished, Output

Delivered = tuple[list[tuple[str, Output]], list[Finished]]


class StaticBatch:
    """What the members of the running batch are to be told. ``rows``: those that have ended too."""

    def __init__(self) -> None:
        self.rows = 0
        self._outputs: list[tuple[str, Output]] = []
        self._finished: list[Finished] = []

    def hold(
        self,
        outputs: list[tuple[str, Output]],
        finished: list[Finished],
        now: float,
        *,
        ended: bool,
    ) -> Delivered:
        """What an iteration brought, kept until the batch has ended; cancellations go at once."""
        gone = [f for f in finished if f.reason == "cancelled"]
        self._outputs.extend(outputs)
        self._finished.extend(f for f in finished if f.reason != "cancelled")
        if not ended:
            return [], gone
        for _, output in self._outputs:
            if output.finish is not None:
                output.stamps.update({Stamp.FIRST_TOKEN: now, Stamp.FINISHED: now})
        told = self._outputs, [*self._finished, *gone]
        self._outputs, self._finished, self.rows = [], [], 0
        return told
