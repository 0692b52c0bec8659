"""One engine step as arrays: what a backend computes and what it hands back."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.replica.engines.torch.lora import Adapter

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Step:
    """Rows (tokens) of all sequences one after the other; no padding.

    ``starts`` [S + 1]: rows starts[s] to starts[s + 1] - 1 are sequence s, whose first row has
    position ``begins``[s]. ``tables`` [S, pages]: KV pages of each sequence. ``logit_rows`` [R]:
    rows a token is chosen after; ``full`` [R]: whether all its logits are wanted or only the
    best token.
    """

    tokens: Ints
    starts: Ints
    begins: Ints
    tables: Ints
    adapters: List[Adapter | None]
    logit_rows: Ints
    full: NDArray[np.bool_]
    ids: List[str]  # sequences' ids, for backends that keep state of their own


@dataclass(frozen=True)
class Result:
    """``best`` [R]: token with the greatest logit (the lowest of equals); ``logits`` [F, V]
    fp32: rows whose ``full`` is set, in order; None when there are none."""

    best: NDArray[np.int64]
    logits: Tensor | None


class Backend(Protocol):
    """Computes steps over the KV memory it owns."""

    name: str
    reuse: bool  # whether pages can be shared between sequences

    def forward(self, step: Step) -> Result: ...

    def use_threads(self, count: int) -> None:
        """Compute the next pass with this many threads; called in the thread that computes."""

    def forget(self, sequence: str) -> None:
        """A sequence has ended or lost its pages."""
        ...
