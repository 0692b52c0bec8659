"""Tokens to text, piece by piece: no half characters, no half stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer, decoders

REPLACEMENT = "\ufffd"
LONGEST_WINDOW = 64  # tokens that a run of invalid bytes may hold back


class Detokenizer(Protocol):
    """Incremental decoder of one answer. The pieces' concatenation is the full decoding."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; "" while a character is still open."""
        ...

    def flush(self) -> str:
        """What is left at the end: an unfinished character becomes U+FFFD."""
        ...


class Vocabulary:
    """The decoding side of a tokenizer: whole answers and incremental decoders.

    Byte-level tokenizers (GPT-2's alphabet) are decoded from a table of each token's bytes,
    others by the tokenizers library over a short window. Special tokens are left out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._bytes: dict[int, bytes] = dict.fromkeys(self.special, b"")

    def decode(self, tokens: Sequence[int]) -> str:
        """The whole text of an answer."""
        if self._byte_level:
            return self.raw(tokens).decode("utf-8", "replace")
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def raw(self, tokens: Sequence[int]) -> bytes:
        """The bytes of byte-level tokens, one after another."""
        table = self._bytes
        try:
            return b"".join([table[token] for token in tokens])
        except KeyError:
            for token in tokens:
                if token not in table:
                    table[token] = self._lookup(token)
            return b"".join([table[token] for token in tokens])

    def _lookup(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        try:
            return bytes([_BYTE_OF[c] for c in text])
        except KeyError:  # an added token outside the alphabet stands for itself
            return str(text).encode()

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token as logprobs report them; special tokens by their name."""
        if token in self.special or not self._byte_level:
            text: str = self._tokenizer.decode([token], skip_special_tokens=False)
            return text.encode()
        return self.raw((token,))

    def detokenizer(self) -> Detokenizer:
        return _ByteDetokenizer(self) if self._byte_level else _WindowDetokenizer(self)


class _ByteDetokenizer:
    __slots__ = ("_decoder", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(self._vocabulary.raw(tokens))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _WindowDetokenizer:
    """Decodes the last piece together with the tokens before it (as vLLM and TGI do), because
    sentencepiece decoders treat the first token of a text differently."""

    __slots__ = ("_prefix_text", "_read", "_vocabulary", "_window")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._read = 0  # tokens of the window whose text has been given out
        self._prefix_text = ""

    def push(self, tokens: Sequence[int]) -> str:
        self._window.extend(tokens)
        text = self._vocabulary.decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._read < LONGEST_WINDOW:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._vocabulary.decode(self._window))

    def _emit(self, text: str) -> str:
        new = text[len(self._prefix_text) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._prefix_text = self._vocabulary.decode(self._window)
        return new


class StopScanner:
    """Finds the first stop string in a text that arrives in pieces.

    A tail that may be the beginning of a stop string is held back until it is decided.
    """

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include  # whether the stop string itself belongs to the answer
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string was met (then the rest is cut)."""
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The one that is complete first, so that it does not matter how the text is cut.
            at, stop = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
            self._held = ""
            return text[: at + len(stop)] if self._include else text[:at], True
        keep = max(_open_prefix(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def push_keeping(self, piece: str) -> tuple[str, str | None]:
        """Like ``push`` for a marker that belongs to the text: shown text, and everything from
        the marker on (None: not met)."""
        text = self._held + piece
        at = min((i for stop in self._stops if (i := text.find(stop)) >= 0), default=-1)
        if at >= 0:
            self._held = ""
            return text[:at], text[at:]
        return self.push(piece)[0], None

    def flush(self) -> str:
        """The held tail: the answer ended, so it was no stop string."""
        held, self._held = self._held, ""
        return held


def _open_prefix(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte, reversed."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    hidden = [b for b in range(256) if b not in set(printable)]
    table.update({chr(256 + i): b for i, b in enumerate(hidden)})
    return table


_BYTE_OF = _alphabet()
