"""Choosing tokens: all rows of a step at once, each as if it were alone.

A row's random number comes from its request's seed and the index of the token alone, and every
operation works within a row, so a request gives the same text in any batch as long as its
logits are the same. One uniform number a token, mapped through the cumulative distribution.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.messages import Sampling, TokenLogprobs, TopLogprob

CANDIDATES = 256  # tokens looked at first for top_k, top_p and min_p: no sort of the vocabulary


@dataclass(frozen=True)
class Row:
    """What choosing one row's token needs to know of its request."""

    sampling: Sampling
    seed: int
    index: int  # of the token among the answer's
    prompt: List[int]
    output: List[int]
    mask: NDArray[np.bool_] | None = field(default=None)  # tokens a grammar allows


def needs_logits(sampling: Sampling, index: int) -> bool:
    """Whether the token with the greatest raw logit is not all there is to know."""
    return (
        sampling.temperature > 0
        or sampling.logprobs is not None
        or sampling.grammar is not None
        or _penalised(sampling)
        or index < sampling.min_tokens
    )


def _penalised(s: Sampling) -> bool:
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


def choose(logits: Tensor, rows: List[Row]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """A token for each row of ``logits`` (fp32 [rows, vocabulary], overwritten).

    Log probabilities are those of the model's own distribution, before penalties, temperature
    and truncation.
    """
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    raw = torch.log_softmax(logits[wanted], -1) if wanted else None
    _penalise(logits, rows)
    _forbid(logits, rows)
    tokens = logits.argmax(-1)
    random = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if random:
        tokens[random] = _draw(logits[random], [rows[i] for i in random])
    chosen = tokens.tolist()
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    if raw is not None:
        for i, line in zip(wanted, _logprobs(raw, tokens[wanted], rows, wanted), strict=True):
            logprobs[i] = line
    return chosen, logprobs


def _logprobs(
    raw: Tensor, tokens: Tensor, rows: List[Row], wanted: List[int]
) -> list[TokenLogprobs]:
    counts = [rows[i].sampling.logprobs or 0 for i in wanted]
    own = raw.gather(1, tokens[:, None])[:, 0].tolist()
    values, indices = raw.topk(min(max(counts), raw.shape[1]), -1)
    best = [
        tuple(TopLogprob(t, v) for t, v in zip(ts[:n], vs[:n], strict=True))
        for ts, vs, n in zip(indices.tolist(), values.tolist(), counts, strict=True)
    ]
    return [TokenLogprobs(lp, top) for lp, top in zip(own, best, strict=True)]


def _penalise(logits: Tensor, rows: List[Row]) -> None:
    """Repetition (CTRL) over prompt and output; presence and frequency (OpenAI) over output."""
    at_row, at_token, made, factor, presence, frequency = [], [], [], [], [], []
    for i, row in enumerate(rows):
        s = row.sampling
        if not _penalised(s):
            continue
        both = np.concatenate([np.asarray(row.prompt), np.asarray(row.output)]).astype(np.int64)
        tokens, place = np.unique(both, return_inverse=True)
        at_row.append(np.full(len(tokens), i))
        at_token.append(tokens)
        made.append(np.bincount(place[len(row.prompt) :], minlength=len(tokens)))
        factor.append(np.full(len(tokens), s.repetition_penalty))
        presence.append(np.full(len(tokens), s.presence_penalty))
        frequency.append(np.full(len(tokens), s.frequency_penalty))
    if not at_row:
        return
    where = (torch.from_numpy(np.concatenate(at_row)), torch.from_numpy(np.concatenate(at_token)))
    count, by = np.concatenate(made), torch.from_numpy(np.concatenate(factor)).float()
    minus = np.concatenate(presence) * (count > 0) + np.concatenate(frequency) * count
    values = logits[where]
    values = torch.where(values > 0, values / by, values * by)
    logits[where] = values - torch.from_numpy(minus).float()


def _forbid(logits: Tensor, rows: List[Row]) -> None:
    """No end token before min_tokens; nothing a grammar excludes."""
    for i, row in enumerate(rows):
        if row.index < row.sampling.min_tokens and row.sampling.stop_token_ids:
            logits[i, list(row.sampling.stop_token_ids)] = -torch.inf
        if row.mask is not None:
            logits[i].masked_fill_(~torch.from_numpy(row.mask), -torch.inf)


def uniform(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, token index): splitmix64's finaliser, twice."""

    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
        return mixed

    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        bits = mix(mix(seeds + golden) + (indices + np.uint64(1)) * golden)
    numbers: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _draw(logits: Tensor, rows: List[Row]) -> Tensor:
    """Temperature, then top_k, top_p, min_p; a token by the inverse of the distribution."""
    kinds = [row.sampling for row in rows]
    mask64 = (1 << 64) - 1
    u = torch.from_numpy(
        uniform(
            np.array([row.seed & mask64 for row in rows], dtype=np.uint64),
            np.array([row.index for row in rows], dtype=np.uint64),
        )
    )
    temperature = torch.tensor([s.temperature for s in kinds]).clamp_min(1e-5)
    probabilities = torch.softmax(logits / temperature[:, None], -1)
    cut = [i for i, s in enumerate(kinds) if s.top_k or s.top_p < 1 or s.min_p > 0]
    tokens = torch.empty(len(rows), dtype=torch.int64)
    whole = [i for i in range(len(rows)) if i not in set(cut)]
    if whole:
        tokens[whole] = _invert(probabilities[whole], u[whole])
    if cut:
        tokens[cut] = _draw_cut(probabilities[cut], [kinds[i] for i in cut], u[cut])
    return tokens


def _invert(weights: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds u times the total."""
    cumulative = weights.double().cumsum(-1)
    target = u[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return found.clamp_max(weights.shape[1] - 1)


def _draw_cut(probabilities: Tensor, kinds: List[Sampling], u: Tensor) -> Tensor:
    """Truncated rows: among the best candidates where these hold all that may be chosen."""
    vocabulary = probabilities.shape[1]
    count = min(CANDIDATES, vocabulary)
    values, indices = probabilities.topk(count, -1)
    held, least = values.double().sum(-1), values[:, -1]
    enough = torch.tensor([0 < s.top_k <= count for s in kinds])
    enough |= held >= torch.tensor([s.top_p if s.top_p < 1 else 2.0 for s in kinds])
    enough |= least < values[:, 0] * torch.tensor([s.min_p for s in kinds])
    tokens = torch.empty(len(kinds), dtype=torch.int64)
    few, many = enough.nonzero()[:, 0], (~enough).nonzero()[:, 0]
    for rows, best, order in (
        (few, values[few], indices[few]),
        (many, *probabilities[many].sort(stable=True, dim=-1, descending=True)),
    ):
        if len(rows):
            own = [kinds[i] for i in rows.tolist()]
            picked = _invert(_truncate(best, own), u[rows])
            tokens[rows] = order.gather(1, picked[:, None])[:, 0]
    return tokens


def _truncate(sorted_: Tensor, kinds: List[Sampling]) -> Tensor:
    """Weights, best first, with those outside top_k, top_p or min_p set to zero."""
    size = sorted_.shape[1]
    top_k = torch.tensor([s.top_k or size for s in kinds])
    top_p = torch.tensor([s.top_p for s in kinds], dtype=torch.float64)
    min_p = torch.tensor([s.min_p for s in kinds])
    all_k = torch.tensor([not s.top_k for s in kinds])
    weights = sorted_.double().masked_fill(torch.arange(size) >= top_k[:, None], 0.0)
    # top_p is a share of what top_k left; without top_k of the whole distribution, which is 1.
    total = torch.where(all_k, 1.0, weights.sum(-1))
    before = weights.cumsum(-1) - weights
    outside = (before >= (top_p * total)[:, None]) | (sorted_ < (sorted_[:, 0] * min_p)[:, None])
    outside[:, 0] = False
    return weights.masked_fill(outside & ((top_p < 1)[:, None] | (min_p > 0)[:, None]), 0.0)
