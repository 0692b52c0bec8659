"""Answers as JSON: whole ones and the chunks of streams, for both routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from services.gateway import logprobs
from services.gateway.answer import Answer, Choice
from services.gateway.errors import ApiError
from services.gateway.tools import Calls

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients skip it, proxies see life


class Form(Protocol):
    """How a route writes an answer."""

    @property
    def end(self) -> bytes:
        """What ends a stream that was finished."""
        ...

    def error(self, error: ApiError) -> bytes:
        """What ends one that was not, so that clients raise."""
        ...

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


class _Ends:
    """How the streams of both older routes end."""

    end = DONE

    def error(self, error: ApiError) -> bytes:
        """No [DONE] follows, so that clients raise."""
        return b"data: " + error.body() + b"\n\n"


class ChatForm(_Ends):
    """``chat.completion`` and ``chat.completion.chunk``. ``calls`` by choice when tools were
    offered."""

    def __init__(
        self,
        answer: str,
        created: int,
        model: str,
        emulated: bool,
        stream: bool,
        with_usage: bool,
        calls: Sequence[Calls] = (),
    ) -> None:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        self._in = _Envelope(f"chatcmpl-{answer}", kind, created, model, emulated, with_usage)
        self._calls = calls

    def whole(self, answer: Answer) -> bytes:
        return self._in.whole([self._choice(choice) for choice in answer.choices], answer)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text(), "refusal": None}
        finish = choice.finish
        if self._calls:
            calls = self._calls[choice.index]
            said = calls.push(choice.text())
            rest, made = calls.finish()
            message["content"] = said + rest
            if made:
                message["content"] = message["content"] or None
                message["tool_calls"], finish = made, "tool_calls"
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs.chat(choice, 0, len(choice.tokens)),
            "finish_reason": finish,
        }

    def first(self, choice: Choice) -> bytes:
        return self._in.chunk(
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
            b'"finish_reason":null}' % choice.index
        )

    def piece(self, choice: Choice) -> bytes:
        text, start, end = choice.fresh()
        if self._calls:
            text = self._calls[choice.index].push(text)
        return self._piece(choice, text, start, end) if text or start < end else b""

    def _piece(self, choice: Choice, text: str, start: int, end: int) -> bytes:
        probabilities = logprobs.chat(choice, start, end)
        if not text and probabilities is None:
            return b""
        return self._in.chunk(
            b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}'
            % (choice.index, orjson.dumps(text), orjson.dumps(probabilities))
        )

    def last(self, choice: Choice) -> bytes:
        parts, finish = [], choice.finish
        if self._calls:
            rest, made = self._calls[choice.index].finish()
            if rest:
                parts.append(self._piece(choice, rest, 0, 0))
            if made:
                finish = "tool_calls"
                delta = {"tool_calls": [{"index": i, **call} for i, call in enumerate(made)]}
                parts.append(
                    self._in.chunk(
                        b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}'
                        % (choice.index, orjson.dumps(delta))
                    )
                )
        parts.append(
            self._in.chunk(
                b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}'
                % (choice.index, orjson.dumps(finish))
            )
        )
        return b"".join(parts)

    def usage(self, answer: Answer) -> bytes:
        return self._in.usage_chunk(answer)


class CompletionForm(_Ends):
    """``text_completion``, whole and in chunks. With ``echo`` the prompt comes first."""

    def __init__(
        self,
        answer: str,
        created: int,
        model: str,
        emulated: bool,
        with_usage: bool,
        echo: bool = False,
    ) -> None:
        self._in = _Envelope(
            f"cmpl-{answer}", "text_completion", created, model, emulated, with_usage
        )
        self._echo = echo

    def whole(self, answer: Answer) -> bytes:
        return self._in.whole(
            [
                {
                    "index": c.index,
                    "text": self._prompt(c) + c.text(),
                    "logprobs": logprobs.completion(c, 0, len(c.tokens)),
                    "finish_reason": c.finish,
                }
                for c in answer.choices
            ],
            answer,
        )

    def _prompt(self, choice: Choice) -> str:
        return choice.model.vocabulary.decode(choice.request.prompt) if self._echo else ""

    def first(self, choice: Choice) -> bytes:
        return self._chunk(choice, self._prompt(choice), None) if self._echo else b""

    def piece(self, choice: Choice) -> bytes:
        text, start, end = choice.fresh()
        return self._chunk(choice, text, logprobs.completion(choice, start, end))

    def _chunk(self, choice: Choice, text: str, probabilities: dict[str, Any] | None) -> bytes:
        return self._in.chunk(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}'
            % (choice.index, orjson.dumps(text), orjson.dumps(probabilities))
        )

    def last(self, choice: Choice) -> bytes:
        return self._in.chunk(
            b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b}'
            % (choice.index, orjson.dumps(choice.finish))
        )

    def usage(self, answer: Answer) -> bytes:
        return self._in.usage_chunk(answer)
