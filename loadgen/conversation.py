"""One request to an OpenAI-compatible server and what was seen of its answer.

Reads server-sent events as the stock client does, but does not take a bare end for success: a
stream must bring ``[DONE]``.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from loadgen.metrics import Outcome

_REFUSED = (429, 503)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def words(self) -> str:
        part = self.delta or self.message
        if part is None:
            return self.text or ""
        return (part.content or "") + (part.reasoning_content or "")


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_decoder = msgspec.json.Decoder(_Answer)


class Observation:
    """The receiver of one response; fills an ``Outcome``.

    ``now`` is ``time.perf_counter()`` throughout, ``origin`` its value at the run's start.
    """

    def __init__(self, outcome: Outcome, *, origin: float = 0.0, keep_text: bool = False) -> None:
        self.outcome = outcome
        self._origin = origin
        self._keep_text = keep_text
        self._text: list[str] = []
        self._buffer = b""
        self._streaming = False
        self._done = False
        self._last = 0.0
        self._chunks = 0
        self._usage: _Usage | None = None

    # client.Receiver

    def on_response(self, status: int, headers: dict[str, str], now: float) -> None:
        self.outcome.status = status
        self.outcome.headers = {k: v for k, v in headers.items() if k.startswith("x-")}
        if "retry-after" in headers:
            self.outcome.headers["retry-after"] = headers["retry-after"]
        kind = headers.get("content-type", "")
        self._streaming = status == 200 and kind.startswith("text/event-stream")

    def on_body(self, data: bytes, now: float) -> None:
        if self.outcome.first_byte is None:
            self.outcome.first_byte = now - self._origin
        self._buffer += data
        if self._streaming:
            self._events(now)

    # end of the exchange

    def complete(self, now: float) -> None:
        """The response came whole (as HTTP); judge it."""
        outcome = self.outcome
        outcome.finished = now - self._origin
        if outcome.status != 200:
            outcome.error = f"HTTP {outcome.status}: {_message(self._buffer)}"
            outcome.refused = outcome.status in _REFUSED
        elif not self._streaming:
            self._take(self._buffer, now)
            outcome.first_token = outcome.finished
            outcome.gaps = []
        elif not self._done and outcome.error is None:
            outcome.error = "the stream ended without [DONE]"
        self._count()

    def failed(self, reason: str, now: float) -> None:
        """No complete response came."""
        self.outcome.finished = now - self._origin
        self.outcome.error = self.outcome.error or reason
        self._count()

    def _count(self) -> None:
        outcome = self.outcome
        if self._usage is not None:
            outcome.input_tokens = self._usage.prompt_tokens
            outcome.output_tokens = self._usage.completion_tokens
            outcome.counted_by = "usage"
        else:
            outcome.output_tokens, outcome.counted_by = self._chunks, "chunks"
        if outcome.error is None and outcome.first_token is None:
            outcome.first_token = outcome.finished  # an answer of no visible text
        if self._keep_text:
            outcome.text = "".join(self._text)

    def _events(self, now: float) -> None:
        """Take every complete line out of the buffer."""
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self._done = True
                else:
                    self._take(data, now)

    def _take(self, data: bytes, now: float) -> None:
        try:
            answer = _decoder.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as e:
            self.outcome.error = f"unreadable answer: {e}: {data[:120]!r}"
            return
        if answer.error is not None:
            self.outcome.error = f"error in the stream: {_message(data)}"
            return
        if answer.usage is not None:
            self._usage = answer.usage
        for choice in answer.choices:
            if choice.words:
                self._word(choice.words, now)
            if choice.finish_reason is not None:
                self.outcome.finish_reason = choice.finish_reason

    def _word(self, words: str, now: float) -> None:
        self._chunks += 1
        if self.outcome.first_token is None:
            self.outcome.first_token = now - self._origin
        else:
            self.outcome.gaps.append(now - self._last)
        self._last = now
        if self._keep_text:
            self._text.append(words)


def _message(body: bytes) -> str:
    """The message of an OpenAI-shaped error, else the beginning of the body."""
    try:
        parsed: Any = orjson.loads(body)
        error = parsed["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace")
