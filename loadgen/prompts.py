"""Prompts of real chats, cut or repeated to the token lengths of a trace.

Reads chat JSONL (``messages``), Alpaca (``instruction``/``input``/``output``) and ShareGPT
(``conversations``), one object a line or one JSON array. The answer in the data is the
reference: it goes into the detailed result, so that a scorer can compute its cross-entropy
under the adapter version that served the request.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import orjson

from shared.split import is_inference, sample_id

CHARACTERS_PER_TOKEN = 4.0
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}

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
        for where, entry in _entries(path):
            sample = _sample(where, entry, path.name)
            if split == "all" or is_inference(sample.id):
                samples.append(sample)
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


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, parsed object) of a JSONL file or a file that is one JSON array."""
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise PromptError(f"{path}: cannot be read: {e.strerror}") from e
    if raw.lstrip().startswith(b"["):
        try:
            entries = orjson.loads(raw)
        except orjson.JSONDecodeError as e:
            raise PromptError(f"{path}:{e.lineno}: not JSON: {e.msg}") from e
        for k, entry in enumerate(entries):
            yield f"{path}: entry {k + 1}", entry
        return
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", orjson.loads(line)
        except orjson.JSONDecodeError as e:
            raise PromptError(f"{path}:{number}: not JSON: {e.msg}") from e


def _sample(where: str, entry: Any, source: str) -> Sample:
    try:
        messages = _messages(entry)
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise PromptError(
            f"{where}: messages (role, content), instruction/output or conversations expected: "
            f"{type(e).__name__} {e}"
        ) from e
    last = max((k for k, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    asked = messages if last is None else messages[:last]
    users = [m for m in asked if m["role"] == "user"]
    if not users or asked[-1]["role"] != "user":
        raise PromptError(f"{where}: a user message before the last answer expected")
    return Sample(
        id=sample_id(users[0]["content"]),
        messages=tuple(asked),
        reference="" if last is None else messages[last]["content"],
        source=source,
    )


def _messages(entry: Any) -> list[Message]:
    if "messages" in entry:
        return [{"role": str(m["role"]), "content": _text(m["content"])} for m in entry["messages"]]
    if "conversations" in entry:
        turns = entry["conversations"]
        return [
            {"role": _SHAREGPT_ROLES.get(t["from"], t["from"]), "content": _text(t["value"])}
            for t in turns
        ]
    question = _text(entry["instruction"])
    if entry.get("input"):
        question = f"{question}\n\n{_text(entry['input'])}"
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": _text(entry["output"])},
    ]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"text expected, found {type(value).__name__}")
    return value
