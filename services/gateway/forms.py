"""Answers as JSON: whole ones and the chunks of streams, for both routes."""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from services.gateway.answer import Answer, Choice
from services.gateway.errors import ApiError

DONE = b"data: [DONE]\n\n"


class Form(Protocol):
    """How a route writes an answer."""

    def whole(self, answer: Answer) -> bytes: ...

    def first(self, choice: Choice) -> bytes:
        """What opens a choice's stream ("" for completions)."""
        ...

    def piece(self, choice: Choice) -> bytes:
        """A chunk with the text that is new."""
        ...

    def last(self, choice: Choice) -> bytes:
        """The chunk with the finish reason."""
        ...

    def usage(self, answer: Answer) -> bytes:
        """The chunk with the usage alone."""
        ...


class _Envelope:
    """What all parts of one answer share. ``fingerprint`` marks emulated engines."""

    def __init__(
        self, id: str, object: str, created: int, model: str, emulated: bool, with_usage: bool
    ) -> None:
        self.id, self.object, self.created, self.model = id, object, created, model
        self.fingerprint = "emulated" if emulated else None
        self._head = (
            b"data: "
            + orjson.dumps(
                {
                    "id": id,
                    "object": object,
                    "created": created,
                    "model": model,
                    "system_fingerprint": self.fingerprint,
                }
            )[:-1]
        )
        self._tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        return b"".join((self._head, b',"choices":[', choice, b"]", self._tail))

    def usage_chunk(self, answer: Answer) -> bytes:
        usage = orjson.dumps(answer.usage())
        return b"".join((self._head, b',"choices":[],"usage":', usage, b"}\n\n"))

    def whole(self, choices: list[dict[str, Any]], answer: Answer) -> bytes:
        return orjson.dumps(
            {
                "id": self.id,
                "object": self.object,
                "created": self.created,
                "model": self.model,
                "choices": choices,
                "usage": answer.usage(),
                "system_fingerprint": self.fingerprint,
            }
        )


class ChatForm:
    """``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(
        self, answer: str, created: int, model: str, emulated: bool, stream: bool, with_usage: bool
    ) -> None:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        self._in = _Envelope(f"chatcmpl-{answer}", kind, created, model, emulated, with_usage)

    def whole(self, answer: Answer) -> bytes:
        return self._in.whole(
            [
                {
                    "index": c.index,
                    "message": {"role": "assistant", "content": c.text(), "refusal": None},
                    "logprobs": None,
                    "finish_reason": c.finish,
                }
                for c in answer.choices
            ],
            answer,
        )

    def first(self, choice: Choice) -> bytes:
        return self._in.chunk(
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
            b'"finish_reason":null}' % choice.index
        )

    def piece(self, choice: Choice) -> bytes:
        text, _, _ = choice.fresh()
        return self._in.chunk(
            b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
            % (choice.index, orjson.dumps(text))
        )

    def last(self, choice: Choice) -> bytes:
        return self._in.chunk(
            b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}'
            % (choice.index, orjson.dumps(choice.finish))
        )

    def usage(self, answer: Answer) -> bytes:
        return self._in.usage_chunk(answer)


class CompletionForm:
    """``text_completion``, whole and in chunks."""

    def __init__(
        self, answer: str, created: int, model: str, emulated: bool, with_usage: bool
    ) -> None:
        self._in = _Envelope(
            f"cmpl-{answer}", "text_completion", created, model, emulated, with_usage
        )

    def whole(self, answer: Answer) -> bytes:
        return self._in.whole(
            [
                {"index": c.index, "text": c.text(), "logprobs": None, "finish_reason": c.finish}
                for c in answer.choices
            ],
            answer,
        )

    def first(self, choice: Choice) -> bytes:
        return b""

    def piece(self, choice: Choice) -> bytes:
        text, _, _ = choice.fresh()
        return self._in.chunk(
            b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'
            % (choice.index, orjson.dumps(text))
        )

    def last(self, choice: Choice) -> bytes:
        return self._in.chunk(
            b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b}'
            % (choice.index, orjson.dumps(choice.finish))
        )

    def usage(self, answer: Answer) -> bytes:
        return self._in.usage_chunk(answer)


def error_frame(error: ApiError) -> bytes:
    """An error after the stream has begun; no [DONE] follows, so that clients raise."""
    return b"data: " + error.body() + b"\n\n"
