"""The OpenAPI description, made from the types that parse requests and describe answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway import params, responses, shapes, wire
from services.gateway.feedback import FeedbackRequest
from services.gateway.front import ADMIN, OPEN
from services.gateway.job_request import JobRequest
from services.gateway.lora_routes import LoadRequest, UnloadRequest
from services.gateway.prompts import ROLES
from services.gateway.routes import MOST
from services.gateway.text_routes import REFUSED, DetokenizeRequest, TokenizeRequest

REFERENCE = "#/components/schemas/{name}"
PLAIN = "text/plain"
EVENTS = "text/event-stream"


class Route(msgspec.Struct, frozen=True):
    """One operation. ``answer``: a type, a media type, or None where none succeeds."""

    summary: str
    answer: Any
    body: type[msgspec.Struct] | None = None
    paged: bool = False
    also: str = ""  # another media type of the same answer
    multipart: bool = False


_JOBS = "/v1/fine_tuning/jobs"
ROUTES: dict[tuple[str, str], Route] = {
    ("post", "/v1/chat/completions"): Route(
        "Answer a chat", shapes.ChatCompletion, wire.ChatRequest, also=EVENTS
    ),
    ("post", "/v1/completions"): Route(
        "Continue a text", shapes.Completion, wire.CompletionRequest, also=EVENTS
    ),
    ("post", "/v1/responses"): Route(
        "Answer one input", shapes.Response, responses.ResponseRequest, also=EVENTS
    ),
    ("get", "/v1/models"): Route("Base models and adapters", shapes.ModelList),
    ("get", "/v1/models/{name}"): Route("One model", shapes.Model),
    ("delete", "/v1/models/{name}"): Route("Remove a fine-tuned model", shapes.Deleted),
    ("post", "/tokenize"): Route("Tokens of a text or a chat", shapes.Tokens, TokenizeRequest),
    ("post", "/detokenize"): Route("Text of tokens", shapes.Prompt, DetokenizeRequest),
    ("post", "/v1/load_lora_adapter"): Route(
        "Load an adapter on all replicas (admin)", PLAIN, LoadRequest
    ),
    ("post", "/v1/unload_lora_adapter"): Route("Remove an adapter (admin)", PLAIN, UnloadRequest),
    ("post", "/v1/files"): Route("Upload training data", shapes.File, multipart=True),
    ("get", "/v1/files"): Route("Files, newest first", shapes.FileList, paged=True),
    ("get", "/v1/files/{file_id}"): Route("One file", shapes.File),
    ("delete", "/v1/files/{file_id}"): Route("Delete a file", shapes.Deleted),
    ("get", "/v1/files/{file_id}/content"): Route("A file's bytes", "application/octet-stream"),
    ("post", _JOBS): Route("Start a fine-tuning job", shapes.Job, JobRequest),
    ("get", _JOBS): Route("Jobs, newest first", shapes.JobList, paged=True),
    ("get", _JOBS + "/{job_id}"): Route("One job", shapes.Job),
    ("post", _JOBS + "/{job_id}/{verb}"): Route("cancel, pause or resume a job", shapes.Job),
    ("get", _JOBS + "/{job_id}/events"): Route(
        "What happened to a job", shapes.JobEventList, paged=True
    ),
    ("get", _JOBS + "/{job_id}/checkpoints"): Route(
        "Published versions of a job", shapes.CheckpointList, paged=True
    ),
    ("post", "/v1/feedback"): Route(
        "What a user thinks of an answer", shapes.Feedback, FeedbackRequest
    ),
    ("get", "/health"): Route("Whether requests can be answered", shapes.Health),
    ("get", "/health/live"): Route("Whether the process lives", shapes.Health),
    ("get", "/health/ready"): Route("Whether to send requests here", shapes.Health),
    ("get", "/metrics"): Route("Prometheus metrics", PLAIN),
    ("get", "/version"): Route("The version", shapes.Version),
    **{("post", path): Route(why, None) for path, why in REFUSED.items()},
}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        _IDS,
        {"type": "array", "minItems": 1, "items": _IDS},
    ]
}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": sorted(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
    },
    "required": ["role", "content"],
}
_INPUT_PART = {
    "type": "object",
    "properties": {"type": {"enum": list(responses.PARTS)}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
INPUT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "type": {"const": "message"},
                    "role": {"enum": ["assistant", "developer", "system", "user"]},
                    "content": {
                        "anyOf": [{"type": "string"}, {"type": "array", "items": _INPUT_PART}]
                    },
                },
                "required": ["role", "content"],
            },
        },
    ]
}
HEALTH = frozenset({"/health", "/health/ready"})


def description(version: str) -> dict[str, Any]:
    """The whole document (OpenAPI 3.1)."""
    types = [r.body for r in ROUTES.values() if r.body] + [
        r.answer for r in ROUTES.values() if isinstance(r.answer, type)
    ]
    _, schemas = msgspec.json.schema_components([*types, shapes.Error], ref_template=REFERENCE)
    _narrow(schemas["ChatRequest"], wire.REFUSED_CHAT)
    _narrow(schemas["CompletionRequest"], wire.REFUSED_COMPLETION)
    _narrow(schemas["ResponseRequest"], responses.REFUSED)
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), route in ROUTES.items():
        paths.setdefault(path, {})[method] = _operation(method, path, route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "CoLLM",
            "version": version,
            "description": "OpenAI's API, and vLLM's routes for adapters.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _narrow(schema: dict[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Ranges, and of a refused parameter only the values that leave an answer as it is.

    A range holds where the body has the parameter.
    """
    properties = schema["properties"]
    for name, neutral in refused.items():
        usual = properties[name].get("default")
        values = [None, *neutral] if usual is None else [*neutral]
        properties[name] = {"enum": values, "description": "not supported: changes nothing"}
    ranges: dict[str, dict[str, float]] = {
        **{name: {"minimum": least, "maximum": most} for name, least, most in params.RANGES},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": -1},
        "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 10},
        "n": {"minimum": 1},
        "priority": {"minimum": -params.PRIORITIES, "maximum": params.PRIORITIES},
        "seed": {"minimum": -params.SEEDS, "maximum": params.SEEDS - 1},
        **{n: {"minimum": 1} for n in ("max_tokens", "max_completion_tokens", "max_output_tokens")},
    }
    for name in ranges.keys() & properties.keys():
        _bound(properties[name], **ranges[name])
    if "prompt" in properties and "prompt" not in refused:
        properties["prompt"] = PROMPT
    if "messages" in properties:
        properties["messages"] = {"type": "array", "minItems": 1, "items": MESSAGE}
    if "input" in properties:
        properties["input"] = INPUT


def _bound(schema: dict[str, Any], **limits: float) -> None:
    for option in schema.get("anyOf", [schema]):
        if option.get("type") in ("integer", "number"):
            option.update(limits)


def _operation(method: str, path: str, route: Route) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{method}_{re.sub('[^a-z0-9]+', '_', path.lower()).strip('_')}",
        "responses": _responses(path, route),
    }
    if parameters := _parameters(path, route):
        found["parameters"] = parameters
    if route.body is not None:
        found["requestBody"] = _content("application/json", _ref(route.body), required=True)
    elif route.multipart:
        form = {
            "type": "object",
            "properties": {
                "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                "purpose": {"const": "fine-tune"},
            },
            "required": ["file", "purpose"],
        }
        found["requestBody"] = _content("multipart/form-data", form, required=True)
    if path in OPEN:
        found["security"] = []
    if path in ADMIN:
        found["description"] = "Needs the key of an admin."
    return found


def _responses(path: str, route: Route) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    if route.answer is not None:
        if isinstance(route.answer, str):
            good = _content(route.answer, {"type": "string"})
        else:
            good = _content("application/json", _ref(route.answer))
        if route.also:
            good["content"][route.also] = {"schema": {"type": "string"}}
        responses["200"] = {"description": "Done", **good}
    error = _content("application/json", _ref(shapes.Error))
    responses["4XX"] = {"description": "Refused; the error names the parameter", **error}
    failed = _content("application/json", _ref(shapes.Health)) if path in HEALTH else error
    responses["5XX"] = {"description": "Not possible now; see x-should-retry", **failed}
    return responses


def _parameters(path: str, route: Route) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in re.findall(r"{(\w+)}", path):
        schema: dict[str, Any] = {"type": "string"}
        if name == "verb":
            schema = {"enum": ["cancel", "pause", "resume"]}
        found.append({"name": name, "in": "path", "required": True, "schema": schema})
    if route.paged:
        limit = {"type": "integer", "minimum": 1, "maximum": MOST, "default": 20}
        found.append({"name": "limit", "in": "query", "schema": limit})
        found.append({"name": "after", "in": "query", "schema": {"type": "string"}})
    if route.also:
        for header, _ in params.SLO_HEADERS:
            found.append(
                {
                    "name": header.decode(),
                    "in": "header",
                    "description": "Objective in milliseconds",
                    "schema": {"type": "number", "exclusiveMinimum": 0},
                }
            )
    return found


def _content(media: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"content": {media: {"schema": schema}}, **more}


def _ref(kind: type[Any]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=kind.__name__)}
