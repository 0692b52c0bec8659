"""Prompts of real chats, cut or repeated to the token lengths of a trace.

Reads the forms of ``shared.training_data``. The answer in the data is the reference: it goes
into the detailed result, so that a scorer can compute its cross-entropy under the adapter
version that served the request.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from shared import training_data
from shared.split import is_inference
from shared.training_data import Chat

CHARACTERS_PER_TOKEN = 4.0

Message = dict[str, str]


class PromptError(ValueError):
    """A prompt file cannot be read; the message names file, line and what was expected."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A question and the reference answer that the data gives for it."""

    id: str
    messages: tuple[Message, ...]  # without the reference
    reference: str
    source: str  # name of the file

    @property
    def question(self) -> str:
        """The last user message: the part that is cut or repeated."""
        return self.messages[-1]["content"]


class Lengths(Protocol):
    """Counts and cuts text in tokens."""

    exact: bool

    def shape(self, text: str, tokens: int) -> str:
        """``text`` cut or repeated to ``tokens`` tokens."""
        ...


class ByCharacters:
    """Lengths without a tokenizer: four characters are taken for a token."""

    exact = False

    def shape(self, text: str, tokens: int) -> str:
        wanted = max(1, int(tokens * CHARACTERS_PER_TOKEN))
        return _repeated(text, wanted)[:wanted]


class ByTokenizer:
    """Lengths by a ``tokenizer.json``; a text of N tokens may differ by a token after decoding."""

    exact = True

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.exists():
            raise PromptError(f"{file}: no such file; --tokenizer wants a tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._ids: dict[str, list[int]] = {}

    def shape(self, text: str, tokens: int) -> str:
        ids = self._ids.get(text)
        if ids is None:
            ids = self._tokenizer.encode(text + "\n", add_special_tokens=False).ids
            self._ids[text] = ids
        repeated = ids * (tokens // len(ids) + 1)
        shaped: str = self._tokenizer.decode(repeated[: max(1, tokens)], skip_special_tokens=False)
        return shaped


def _repeated(text: str, length: int) -> str:
    text = text + "\n"
    return text * (length // len(text) + 1)


class Prompts:
    """Endless samples in a seeded order, shaped on request."""

    def __init__(self, samples: Sequence[Sample], lengths: Lengths, seed: int) -> None:
        if not samples:
            raise PromptError("no prompt is left; give --prompts a file with chats")
        self.lengths = lengths
        self._samples = list(samples)
        random.Random(seed).shuffle(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        while True:
            yield from self._samples

    def messages(self, sample: Sample, tokens: int | None) -> tuple[Message, ...]:
        """The sample's messages, its question shaped to ``tokens`` (None: as it is)."""
        if tokens is None:
            return sample.messages
        last = {**sample.messages[-1], "content": self.lengths.shape(sample.question, tokens)}
        return (*sample.messages[:-1], last)


def load(paths: Sequence[Path], *, split: str = "inference") -> list[Sample]:
    """Samples of all files; "inference" keeps the 30 % that training leaves out, "all" all.

    Raises PromptError with file and line.
    """
    samples = []
    for path in paths:
        try:
            chats = training_data.load(path).chats
        except training_data.DataError as e:
            raise PromptError(str(e)) from e
        samples += [
            _sample(path, chat) for chat in chats if split == "all" or is_inference(chat.identity)
        ]
    return samples


def synthetic() -> list[Sample]:
    """A stand-in for when no prompt file is given: plain text without a reference."""
    text = "Tell me about the history, the use and the limits of this idea: number {}."
    return [
        Sample(
            id="",
            messages=({"role": "user", "content": text.format(k)},),
            reference="",
            source="synthetic",
        )
        for k in range(64)
    ]


def _sample(path: Path, chat: Chat) -> Sample:
    messages = [{"role": m["role"], "content": m["content"]} for m in chat.messages]
    last = max(k for k, m in enumerate(messages) if m["role"] == "assistant")
    asked = tuple(messages[:last])
    if not asked or asked[-1]["role"] != "user":
        raise PromptError(f"{path}:{chat.line}: a user message before the last answer expected")
    return Sample(
        id=chat.identity, messages=asked, reference=messages[last]["content"], source=path.name
    )
