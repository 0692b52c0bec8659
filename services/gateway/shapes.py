"""Answers of the routes as types: what the OpenAPI description is made of.

Answers are written by hand where it saves time (``forms``, ``app``, ``*_routes``); the tests hold
every answer against these types.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Fields may be added to an answer; those named here are always there."""


class ErrorDetail(Shape, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape, frozen=True):
    """Every answer that is no success."""

    error: ErrorDetail


class PromptDetails(Shape, frozen=True):
    cached_tokens: int


class Usage(Shape, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CalledFunction(Shape, frozen=True):
    name: str
    arguments: str


class ToolCall(Shape, frozen=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Shape, frozen=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Shape, frozen=True):
    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatCompletion(Shape, frozen=True):
    """With ``stream`` instead: server-sent events of ``chat.completion.chunk`` objects."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None


class TextChoice(Shape, frozen=True):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class Completion(Shape, frozen=True):
    """With ``stream`` instead: server-sent events of the same object."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    system_fingerprint: str | None


class InputDetails(Shape, frozen=True):
    cached_tokens: int


class OutputDetails(Shape, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Shape, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class OutputText(Shape, frozen=True):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class OutputMessage(Shape, frozen=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class Response(Shape, frozen=True):
    """With ``stream`` instead: server-sent events ``response.…``."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    model: str
    output: list[OutputMessage]
    store: Literal[False]
    usage: ResponseUsage
    system_fingerprint: str | None


class Model(Shape, frozen=True):
    """A base model (``parent`` null) or an adapter, which also has version and quality."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    permission: list[Any]
    emulated: bool
    version: str | msgspec.UnsetType = msgspec.UNSET
    quality: float | msgspec.UnsetType = msgspec.UNSET


class ModelList(Shape, frozen=True):
    object: Literal["list"]
    data: list[Model]


class Deleted(Shape, frozen=True):
    id: str
    object: str
    deleted: Literal[True]


class File(Shape, frozen=True):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["fine-tune"]
    status: Literal["processed"]


class Page(Shape, frozen=True):
    """Part of a list, newest first; ``last_id`` is the ``after`` of the next part."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page, frozen=True):
    data: list[File]


class Job(Shape, frozen=True):
    """``fine_tuned_model`` is set as soon as a version can be asked."""

    id: str
    object: Literal["fine_tuning.job"]
    created_at: int
    finished_at: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    result_files: list[str]
    status: Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled"]
    trained_tokens: int | None
    training_file: str
    validation_file: str | None
    seed: int
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    metadata: dict[str, str] | None
    error: dict[str, Any] | None
    paused: bool


class JobList(Page, frozen=True):
    data: list[Job]


class JobEvent(Shape, frozen=True):
    id: str
    object: Literal["fine_tuning.job.event"]
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]


class JobEventList(Page, frozen=True):
    data: list[JobEvent]


class Checkpoint(Shape, frozen=True):
    id: str
    object: Literal["fine_tuning.job.checkpoint"]
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, Any]
    version: str
    quality: float


class CheckpointList(Page, frozen=True):
    data: list[Checkpoint]


class Tokens(Shape, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class Prompt(Shape, frozen=True):
    prompt: str


class Feedback(Shape, frozen=True):
    object: Literal["feedback"]
    request_id: str
    stored: bool
    adapter: str | msgspec.UnsetType = msgspec.UNSET
    home: str | msgspec.UnsetType = msgspec.UNSET


class Health(Shape, frozen=True):
    status: Literal["ok", "unavailable"]


class Version(Shape, frozen=True):
    version: str
