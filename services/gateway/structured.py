"""``response_format``: the JSON schema that constrains an answer, checked before it is queued."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.errors import bad_value, unsupported

LARGEST_SCHEMA = 64 << 10  # bytes
ANY_OBJECT = '{"type":"object"}'


def grammar(response_format: dict[str, Any] | None) -> str | None:
    """The schema as text for the engine; None: free text. Raises ApiError 400."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise unsupported("response_format", f"type {kind!r}; text, json_object, json_schema are")
    outer = response_format.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(schema, dict):
        raise bad_value("response_format", "response_format.json_schema.schema: an object expected")
    return schema_text(schema, "response_format")


def schema_text(schema: dict[str, Any], param: str) -> str:
    """A checked schema as the engine takes it. Raises ApiError 400 naming ``param``."""
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise bad_value(param, "the schema is nested too deeply") from None
    if len(text) > LARGEST_SCHEMA:
        raise bad_value(param, f"the schema is larger than {LARGEST_SCHEMA} bytes")
    _check(schema, param)
    return text


def _check(schema: dict[str, Any], param: str) -> None:
    """Against the meta-schema; only references inside the schema are followed."""
    from jsonschema import Draft202012Validator, SchemaError  # loaded by those who need it

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as e:
        where = "/".join(map(str, e.absolute_path))
        raise bad_value(param, f"not a JSON schema: {where}: {e.message[:200]}") from None
    except RecursionError:
        raise bad_value(param, "the schema is nested too deeply") from None
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise bad_value(param, f"reference {reference!r} leaves the schema")


def _references(value: Any) -> list[str]:
    found, todo = [], [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            if isinstance(item.get("$ref"), str):
                found.append(item["$ref"])
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)
    return found
