"""What an emulated answer says: harmless words of the model's own vocabulary, never a result.

Deterministic: the same prompt, adapter and seed give the same tokens on every replica, so a
continuation on another one goes on with the same text.
"""

from __future__ import annotations

import math
import re
import zlib
from array import array
from pathlib import Path

import orjson

from shared.messages import Generate
from shared.profile import Profile
from shared.records import ModelCard

_WORD = re.compile("[Ġ▁]?[A-Za-z]+")
_ENOUGH = 512


class VocabularyError(ValueError):
    """The tokenizer file cannot be read; names it."""


def printable(folder: Path | None, vocabulary: int) -> tuple[int, ...]:
    """Ids of plain ASCII words in the folder's tokenizer; without one a middle range of ids."""
    if folder is None or not (folder / "tokenizer.json").exists():
        low = min(100, vocabulary // 2)
        return tuple(range(low, min(low + _ENOUGH, vocabulary)))
    path = folder / "tokenizer.json"
    try:
        model = orjson.loads(path.read_bytes())["model"]["vocab"]
        pairs = (
            model.items() if isinstance(model, dict) else ((e[0], i) for i, e in enumerate(model))
        )
        words = sorted(i for word, i in pairs if _WORD.fullmatch(word) and i < vocabulary)
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, IndexError) as e:
        raise VocabularyError(f"{path}: no vocabulary that can be read: {e!r}") from e
    if not words:
        raise VocabularyError(f"{path}: no token of plain letters")
    return tuple(words[:: max(1, len(words) // _ENOUGH)])


def start(request: Generate, seed: int) -> int:
    """Where in the word list the answer to this prompt begins."""
    key = zlib.crc32(array("q", request.prompt).tobytes(), seed & 0xFFFFFFFF)
    key = zlib.crc32((request.adapter or "").encode(), key)
    own = request.sampling.seed
    return key if own is None else zlib.crc32(str(own).encode(), key)


def length(request: Generate, mean: float, seed: int) -> int:
    """Output tokens of the whole answer: max_tokens, or drawn geometrically with that mean.

    The draw depends on the request's id (the same in every attempt) and the engine's seed only.
    """
    sampling = request.sampling
    if sampling.ignore_eos:
        return sampling.max_tokens
    u = (zlib.crc32(request.id.encode(), seed & 0xFFFFFFFF) + 0.5) / 2**32
    drawn = 1 if mean <= 1 else 1 + int(math.log(u) / math.log1p(-1 / mean))
    return max(min(drawn, sampling.max_tokens), min(sampling.min_tokens, sampling.max_tokens), 1)


def model_card(
    name: str, folder: Path | None, profile: Profile, *, created: float
) -> tuple[ModelCard, tuple[int, ...]]:
    """Card and word list of an emulated model; ``folder`` may hold the tokenizer it stands for.

    Raises VocabularyError.
    """
    card = ModelCard(
        name=name,
        path="" if folder is None else str(folder.resolve()),
        context=profile.context,
        vocabulary=profile.vocabulary,
        engine="emulated",
        dtype="",
        created=created,
    )
    return card, printable(folder, profile.vocabulary)
