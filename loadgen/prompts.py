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

from shared import chat, training_data
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


class Lengths(Protocol):
    """Counts and cuts text in tokens."""

    exact: bool

    def shape(self, messages: Sequence[Message], tokens: int) -> str:
        """The last message's text, cut or repeated so that the whole prompt has ``tokens``."""
        ...


class ByCharacters:
    """Lengths without a tokenizer: four characters are taken for a token."""

    exact = False

    def shape(self, messages: Sequence[Message], tokens: int) -> str:
        text = messages[-1]["content"] + "\n"
        wanted = max(1, int(tokens * CHARACTERS_PER_TOKEN))
        return (text * (wanted // len(text) + 1))[:wanted]


class ByTokenizer:
    """Lengths by the model's tokenizer and chat template.

    What the template and earlier messages add is taken off; a prompt is never shorter than that
    and one token, and may differ by a token where text does not decode to the same tokens.
    """

    exact = True

    def __init__(self, path: Path, *, templated: bool = True) -> None:
        folder = path if path.is_dir() else path.parent
        try:
            self._chat = chat.load(folder)
        except chat.ChatError as e:
            raise PromptError(f"--tokenizer: {e}") from e
        self._templated = templated and self._chat.template is not None
        self._ids: dict[str, list[int]] = {}
        self._around: dict[str, int] = {}

    def shape(self, messages: Sequence[Message], tokens: int) -> str:
        text = messages[-1]["content"]
        ids = self._ids.get(text)
        if ids is None:
            ids = self._ids[text] = self._chat.encode(text + "\n")
            self._around[text] = self._overhead(messages)
        wanted = max(1, tokens - self._around[text])
        repeated = ids * (wanted // len(ids) + 1)
        shaped: str = self._chat.tokenizer.decode(repeated[:wanted], skip_special_tokens=False)
        return shaped

    def _overhead(self, messages: Sequence[Message]) -> int:
        """Tokens of the prompt that are not the last message's text."""
        empty = [*messages[:-1], {**messages[-1], "content": ""}]
        if self._templated:
            return len(self._chat.prompt(empty))
        return sum(len(self._chat.encode(m["content"])) for m in empty)


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
        last = {**sample.messages[-1], "content": self.lengths.shape(sample.messages, tokens)}
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
