"""Answers that follow a JSON schema: which tokens may come next (library: llguidance).

The matcher walks along with the answer; before each token it marks those that keep the text
inside the schema, and the others' logits become minus infinity.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.replica.engines.base import Rejected


class Grammar:
    """The state of one answer under its schema."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def mask(self) -> NDArray[np.bool_]:
        """[vocabulary]: True where a token may come next."""
        import llguidance.numpy as guidance

        bits = guidance.allocate_token_bitmask(1, self._vocabulary)
        guidance.fill_next_token_bitmask(self._matcher, bits, 0)
        allowed = np.unpackbits(bits.view(np.uint8)[0], bitorder="little")
        return allowed[: self._vocabulary].astype(np.bool_)

    def accept(self, token: int) -> None:
        """A token was chosen. Raises ValueError when the schema does not allow it."""
        if not self._matcher.consume_token(token):
            raise ValueError(f"token {token} leaves the schema: {self._matcher.get_error()}")

    @property
    def complete(self) -> bool:
        """Nothing may follow."""
        return bool(self._matcher.is_stopped())


class Grammars:
    """Makes grammars over the tokenizer of one model, which is read at the first use."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self._folder, self._vocabulary = folder, vocabulary
        self._tokenizer: Any = None

    def start(self, schema: str, generated: tuple[int, ...]) -> Grammar:
        """A grammar that has seen ``generated``. Raises Rejected for what is no usable schema."""
        import llguidance

        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer(llguidance)
        try:
            text = llguidance.LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_flexible": False}
            )
        except ValueError as e:
            raise _refused(str(e)) from e
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        grammar = Grammar(matcher, self._vocabulary)
        try:
            for token in generated:
                grammar.accept(token)
        except ValueError as e:
            raise _refused(str(e)) from e
        return grammar

    def _read_tokenizer(self, llguidance: Any) -> Any:
        path = self._folder / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as e:
            raise _refused(f"{path} cannot be read ({e.strerror})") from e
        return llguidance.LLTokenizer(text, n_vocab=self._vocabulary, eos_token=self._end())

    def _end(self) -> int:
        """The model's end token, from generation_config.json or config.json."""
        for name in ("generation_config.json", "config.json"):
            path = self._folder / name
            end = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
            if isinstance(end, list) and end:
                end = end[0]
            if isinstance(end, int):
                return end
        raise _refused(f"{self._folder}: no eos_token_id")


def _refused(why: str) -> Rejected:
    return Rejected(
        f"the schema cannot constrain the answer: {why}",
        code="invalid_schema",
        param="response_format",
    )
