"""Training files: three formats in, chats out; every fault named by file and line.

JSON Lines of chats (``{"messages": […]}``, an assistant message with ``"weight": 0`` is not
learnt), Alpaca's JSON (instruction, input, output) and ShareGPT's JSON (conversations); the
latter two also as JSON Lines. No torch and no tokenizer: the gateway checks uploads with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from shared.split import is_inference, sample_id

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "function_response": "tool",
}


class DataError(ValueError):
    """A training file cannot be used. ``line`` counts from 1; None: the file as a whole."""

    def __init__(self, path: Path | str, line: int | None, reason: str) -> None:
        where = f"{path}:{line}" if line is not None else str(path)
        super().__init__(f"{where}: {reason}")
        self.path, self.line, self.reason = Path(path), line, reason


@dataclass(frozen=True)
class Chat:
    """One conversation: messages with role and content, and where it was found."""

    messages: tuple[dict[str, Any], ...]
    line: int

    @property
    def identity(self) -> str:
        """The ``sample_id`` of its first question: the same in every file and on every host."""
        asked = next((m["content"] for m in self.messages if m["role"] == "user"), "")
        return sample_id(asked)


@dataclass(frozen=True)
class Loaded:
    """A file's chats, and what was skipped because the caller asked for it."""

    chats: tuple[Chat, ...]
    skipped: tuple[DataError, ...] = ()


@dataclass(frozen=True)
class Split:
    """Chats to learn from, and chats kept aside."""

    train: tuple[Chat, ...]
    heldout: tuple[Chat, ...]


def load(path: Path, *, skip_broken: bool = False) -> Loaded:
    """All chats of a training file.

    Raises DataError at the first broken line; with ``skip_broken`` such lines are left out and
    counted. A file without any chat is an error in any case.
    """
    chats: list[Chat] = []
    skipped: list[DataError] = []
    for line, record in _records(path, skipped if skip_broken else None):
        try:
            chats.append(Chat(_messages(record), line))
        except ValueError as e:
            error = DataError(path, line, str(e))
            if not skip_broken:
                raise error from e
            skipped.append(error)
    if not chats:
        raise DataError(path, None, f"no chats in it ({len(skipped)} broken lines skipped)")
    return Loaded(tuple(chats), tuple(skipped))


def split(chats: Sequence[Chat], heldout: float) -> Split:
    """Part ``heldout`` (0 to 1) of the chats by their hash: stable under order and additions.

    The paper's division (70 % train, 30 % asked as requests with references) is 0.3; smaller
    parts are subsets of it, so nothing held out here is ever trained there.
    """
    train: list[Chat] = []
    kept: list[Chat] = []
    for chat in chats:
        side = kept if is_inference(chat.identity, heldout) else train
        side.append(chat)
    return Split(tuple(train), tuple(kept))


def _records(path: Path, broken: list[DataError] | None) -> Iterator[tuple[int, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as e:
        raise DataError(path, None, e.strerror or str(e)) from e
    except UnicodeDecodeError as e:
        line = path.read_bytes()[: e.start].count(b"\n") + 1
        raise DataError(path, line, f"not UTF-8 at byte {e.start}") from e
    if text.lstrip().startswith("["):
        yield from _array(path, text)
        return
    for number, raw in enumerate(text.split("\n"), start=1):
        if not raw.strip():
            continue
        try:
            yield number, orjson.loads(raw)
        except orjson.JSONDecodeError as e:
            error = DataError(path, number, f"not JSON: {e}")
            if broken is None:
                raise error from e
            broken.append(error)


def _array(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Elements of a JSON array with the line each begins on; broken JSON cannot be skipped."""
    decoder = json.JSONDecoder()
    position, line, counted = text.index("[") + 1, 1, 0
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        if position >= len(text):
            raise DataError(path, line, "the JSON array is not closed")
        if text[position] == "]":
            return
        line += text.count("\n", counted, position)
        counted = position
        try:
            record, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as e:
            raise DataError(path, e.lineno, f"not JSON: {e.msg}") from e
        yield line, record


def _messages(record: Any) -> tuple[dict[str, Any], ...]:
    """The chat in one record of any format. Raises ValueError saying what is wrong."""
    if not isinstance(record, dict):
        raise ValueError("an object expected")
    if "messages" in record:
        messages = [_message(m, i) for i, m in enumerate(_list(record, "messages"))]
    elif "conversations" in record:
        messages = [_turn(m, i) for i, m in enumerate(_list(record, "conversations"))]
    elif "instruction" in record:
        messages = _alpaca(record)
    else:
        raise ValueError("none of messages, conversations, instruction found")
    if not any(m["role"] == "assistant" and m.get("weight", 1) for m in messages):
        raise ValueError("no assistant message to learn from")
    return tuple(messages)


def _list(record: Mapping[str, Any], key: str) -> list[Any]:
    value = record[key]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key}: a list with at least one message expected")
    return value


def _message(raw: Any, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: an object expected")
    role = raw.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}.role: one of {', '.join(sorted(ROLES))} expected, not {role!r}")
    weight = raw.get("weight", 1)
    if weight not in (0, 1) or isinstance(weight, bool):
        raise ValueError(f"{where}.weight: 0 or 1 expected, not {weight!r}")
    message = {**raw, "content": _content(raw.get("content"), f"{where}.content")}
    if role == "assistant" and not message["content"] and not raw.get("tool_calls"):
        raise ValueError(f"{where}.content: empty answer")
    return message


def _content(value: Any, where: str) -> str:
    """Text, or the joined text parts of OpenAI's list form."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list):
        parts = [p["text"] for p in value if isinstance(p, dict) and isinstance(p.get("text"), str)]
        if len(parts) == len(value):
            return "".join(parts)
    raise ValueError(f"{where}: text (or a list of text parts) expected")


def _turn(raw: Any, index: int) -> dict[str, Any]:
    """One turn of ShareGPT's form."""
    where = f"conversations[{index}]"
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: an object expected")
    role = SHAREGPT_ROLES.get(str(raw.get("from")))
    if role is None:
        raise ValueError(
            f"{where}.from: one of {', '.join(SHAREGPT_ROLES)} expected, not {raw.get('from')!r}"
        )
    if not isinstance(raw.get("value"), str):
        raise ValueError(f"{where}.value: text expected")
    return _message({"role": role, "content": raw["value"]}, index)


def _alpaca(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    for key in ("instruction", "output"):
        if not isinstance(record.get(key), str) or not record[key]:
            raise ValueError(f"{key}: text expected")
    extra = record.get("input") or ""
    if not isinstance(extra, str):
        raise ValueError("input: text expected")
    asked = f"{record['instruction']}\n\n{extra}" if extra else record["instruction"]
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": record["output"]},
    ]
