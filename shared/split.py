"""Which samples train and which are asked: a split by hash, the same in every process.

As in the CoLLM paper about 70 % of a replica's samples train and 30 % arrive as requests whose
references are used to score answers. A hash of the question decides, so that trainer, load
generator and scorer agree without exchanging a list.
"""

from __future__ import annotations

import hashlib

INFERENCE_SHARE = 0.3
_SCALE = float(1 << 64)


def sample_id(question: str) -> str:
    """Stable identity of a sample: 16 hex digits of the SHA-256 of its first user message."""
    return hashlib.sha256(question.strip().encode("utf-8")).hexdigest()[:16]


def is_inference(identity: str, share: float = INFERENCE_SHARE) -> bool:
    """Whether the sample with this ``sample_id`` belongs to the asked (not trained) part."""
    return int(identity, 16) / _SCALE < share
