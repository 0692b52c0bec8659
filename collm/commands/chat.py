"""``collm chat``: talk to a model in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from collm.console import err, fail
from collm.where import DataOption, UrlOption, api_key, gateway_url

HELP = "/reset forgets the talk, /model NAME changes the model, /quit or Ctrl-D ends"
LONGEST = 512  # tokens of an answer, unless the user says otherwise


class Refused(RuntimeError):
    """The gateway answered with an error; the message is its own."""


def register(app: typer.Typer) -> None:
    app.command()(chat)


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One question; without it, a conversation")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model or adapter; default: the first")] = None,
    system: Annotated[str | None, typer.Option(help="System message")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Default: {LONGEST}, at most half of the model's context"),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.7,
    url: UrlOption = None,
    data_dir: DataOption = None,
) -> None:
    """Stream answers from the running system."""
    base = gateway_url(url, data_dir)
    headers = {"authorization": f"Bearer {api_key()}"}
    with httpx.Client(base_url=base, headers=headers, timeout=600.0) as client:
        try:
            name = model or _first_model(client)
            talk = Talk(client, name, system, max_tokens or _length(client, name), temperature)
            if prompt is not None:
                talk.ask(prompt)
            else:
                _converse(talk)
        except httpx.TransportError as e:
            fail(f"the gateway at {base} is not reached: {e}")
        except Refused as e:
            fail(str(e))


class Talk:
    """A conversation with its history."""

    def __init__(
        self,
        client: httpx.Client,
        model: str,
        system: str | None,
        max_tokens: int,
        temperature: float,
    ) -> None:
        self.model = model
        self._client, self._max_tokens, self._temperature = client, max_tokens, temperature
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = list(self._opening)

    def ask(self, text: str) -> None:
        """Send, print the answer as it comes, remember both. Raises Refused."""
        messages = [*self._messages, {"role": "user", "content": text}]
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self._max_tokens,
            "temperature": self._temperature,
            "stream": True,
        }
        answer = ""
        with self._client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                reply.read()
                raise Refused(_message(reply.text))
            for piece in _pieces(reply.iter_lines()):
                print(piece, end="", flush=True)
                answer += piece
        print(flush=True)
        self._messages = [*messages, {"role": "assistant", "content": answer}]


def _length(client: httpx.Client, model: str) -> int:
    """Tokens of an answer that leave room for the question."""
    reply = client.get(f"/v1/models/{quote(model, safe='')}")
    context = reply.json().get("max_model_len") if reply.status_code == 200 else None
    return min(LONGEST, max(1, context // 2)) if context else LONGEST


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """Text of a stream of server-sent events; Refused on an error in the middle."""
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line or not data:
            continue
        if data == "[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise Refused(str(event["error"]["message"]))
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""
    raise Refused("the answer broke off before its end")


def _converse(talk: Talk) -> None:
    err.print(f"{talk.model}. {HELP}", markup=False)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            err.print()
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/reset":
            talk.reset()
        elif text.startswith("/model "):
            talk.model = text.removeprefix("/model ").strip()
        elif text.startswith("/"):
            err.print(HELP, markup=False)
        elif text:
            _ask_once(talk, text)


def _ask_once(talk: Talk, text: str) -> None:
    """A refusal or Ctrl-C ends the answer, not the conversation."""
    try:
        talk.ask(text)
    except Refused as e:
        err.print(str(e), style="red", markup=False)
    except KeyboardInterrupt:
        err.print("\n(stopped)")


def _first_model(client: httpx.Client) -> str:
    reply = client.get("/v1/models")
    if reply.status_code != 200:
        raise Refused(_message(reply.text))
    models = reply.json()["data"]
    if not models:
        raise Refused("the gateway serves no model yet")
    return str(models[0]["id"])


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300] or "empty answer"
