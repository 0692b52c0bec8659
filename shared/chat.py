"""Chats to token ids, without torch: tokenizers plus the model's own chat template in jinja2.

The gateway (prompts) and the training process (examples) share this module, so that a model is
trained on exactly the tokens that it is later asked with. The template runs in jinja2's
immutable sandbox: a template is code from a model folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class ChatError(ValueError):
    """A chat cannot be rendered (or a model folder has no usable tokenizer); says why."""


@dataclass(frozen=True)
class ChatTokenizer:
    """Tokenizer and chat template of one model folder. Thread-safe; encodes in ~0.1 ms."""

    tokenizer: Tokenizer
    template: Template | None
    special: dict[str, str]  # bos_token, eos_token, … as the template sees them
    eos_ids: frozenset[int]  # tokens that end an answer

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The chat as the model's text. Raises ChatError (no template, or it refuses)."""
        if self.template is None:
            raise ChatError("this model has no chat template: use /v1/completions")
        try:
            return self.template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **self.special,
                **variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as e:
            raise ChatError(f"the model's chat template refuses this chat: {e}") from e

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; rendered chats carry their special tokens already."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def prompt(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a chat that waits for the assistant's answer."""
        return self.encode(self.render(messages, add_generation_prompt=True, tools=tools))


def load(folder: Path) -> ChatTokenizer:
    """Read tokenizer.json, tokenizer_config.json and generation_config.json of a model folder.

    Raises ChatError naming the file at fault.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ChatError(f"{path}: no such file; a model folder needs a tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise ChatError(f"{path}: not a tokenizer: {e}") from e
    tokenizer.no_truncation()  # a prompt is never cut unasked, whatever the file says
    tokenizer.no_padding()
    special = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    source = _template_source(folder, config)
    return ChatTokenizer(
        tokenizer=tokenizer,
        template=None if source is None else _compile(source),
        special=special,
        eos_ids=frozenset(_eos_ids(folder, tokenizer, special)),
    )


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    try:
        template = environment.from_string(source)
    except TemplateError as e:
        raise ChatError(f"the model's chat template does not compile: {e}") from e
    template.globals = dict(template.globals)  # jinja's ChainMap makes rendering a third slower
    return template


def _tojson(value: Any, indent: int | None = None) -> str:
    """JSON as transformers renders it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _eos_ids(folder: Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> set[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        found |= {value} if isinstance(value, int) else set(value or ())
    if "eos_token" in special:
        token = tokenizer.token_to_id(special["eos_token"])
        found |= set() if token is None else {token}
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """An absent file is an empty object: all but tokenizer.json are optional."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ChatError(f"{path}: not JSON: {e}") from e
    if not isinstance(content, dict):
        raise ChatError(f"{path}: an object expected")
    return content
