"""The two factors of LoRA modules: pairing them, compressing products, norms of sums.

Names are PEFT's: ``….lora_A.weight`` (rank x in) and ``….lora_B.weight`` (out x rank). No full
product B A is ever formed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Tensors = Mapping[str, Array]
_A, _B = ".lora_A.", ".lora_B."


class AggregationError(ValueError):
    """Nothing can be aggregated; the message says why. The adapter stays as it is."""


def factor(name: str) -> str:
    """Which factor a tensor is, "A" or "B". Raises AggregationError if it is neither."""
    if _A in name:
        return "A"
    if _B in name:
        return "B"
    raise AggregationError(f"tensor {name!r} is neither a lora_A nor a lora_B")


def to_rank(tensors: Tensors, rank: int) -> dict[str, Array]:
    """The adapter's best approximation with another rank, same scaling lora_alpha / rank.

    For a client whose rank differs from the common adapter's; widening is exact.
    """
    out: dict[str, Array] = {}
    for name_a, name_b in pairs(tensors):
        a, b = tensors[name_a], tensors[name_b]
        out[name_a], out[name_b] = compress(
            b.astype(np.float64), a.astype(np.float64), rank, _fill(a, rank)
        )
    return out


def pairs(tensors: Tensors) -> list[tuple[str, str]]:
    """(name of A, name of B) of each module."""
    found = [(n, n.replace(_A, _B)) for n in sorted(tensors) if factor(n) == "A"]
    if 2 * len(found) != len(tensors) or any(b not in tensors for _, b in found):
        raise AggregationError("the tensors are not pairs of lora_A and lora_B")
    return found


def _fill(a: Array, rank: int) -> Array:
    """``rank`` rows for A: its own, repeated; directions that carry nothing start from them."""
    rows: Array = a[np.arange(rank) % a.shape[0]]
    return rows


def compress(
    wide: NDArray[np.float64], tall: NDArray[np.float64], rank: int, spare: Array
) -> tuple[Array, Array]:
    """Rank-``rank`` factors (A, B) nearest to wide @ tall, by SVD of the small core.

    The singular values are shared evenly between the factors. A direction without weight gets
    a zero column in B and the row of ``spare`` in A: with both zero it could never learn.
    """
    qb, rb = np.linalg.qr(wide)
    qa, ra = np.linalg.qr(tall.T)
    u, s, vt = np.linalg.svd(rb @ ra.T)
    k = min(rank, len(s))
    root = np.sqrt(s[:k])
    a, b = spare.astype(np.float64).copy(), np.zeros((wide.shape[0], rank))
    a[:k] = root[:, None] * (vt[:k] @ qa.T)
    b[:, :k] = (qb @ u[:, :k]) * root
    empty = np.flatnonzero(np.r_[s[:k], np.zeros(rank - k)] <= 1e-12 * max(s[0], 1e-300))
    a[empty], b[:, empty] = spare[empty], 0.0
    return a.astype(np.float32), b.astype(np.float32)


def squared_norm(wide: Sequence[NDArray[np.float64]], tall: Sequence[NDArray[np.float64]]) -> float:
    """Squared Frobenius norm of sum_k wide_k @ tall_k, from Gram matrices of the factors."""
    b, a = np.concatenate(wide, axis=1), np.concatenate(tall, axis=0)
    return float(np.sum((b.T @ b) * (a @ a.T)))
