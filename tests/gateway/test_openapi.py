"""The OpenAPI description is complete and true: schemathesis finds nothing that contradicts it."""

from __future__ import annotations

import asyncio
import json
import re
import sys

import msgspec
import pytest

from services.gateway import openapi
from services.gateway.wire import REFUSED, REFUSED_CHAT, ChatRequest
from shared import api_keys
from tests.gateway.conftest import MODEL, Served

# What a schema cannot say (a model's name, a context's length, a file's id) is 4XX for good
# reasons, so that a body in the schema's shape may be refused.
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,response_headers_conformance,negative_data_rejection,"
    "ignored_auth,unsupported_method,missing_required_header"
)


async def test_every_route_is_described_and_nothing_else(served: Served):
    described = (await served.http.get("/openapi.json")).json()
    there = {
        (method.lower(), re.sub(r":path}", "}", route.path))
        for route in served.gateway.asgi._rest.routes
        for method in getattr(route, "methods", ())
        if method != "HEAD" and route.path != "/openapi.json"
    }
    there |= {("post", path) for path in served.gateway.asgi._routes}
    assert {(m, p) for p, methods in described["paths"].items() for m in methods} == there
    assert set(openapi.ROUTES) == there


async def test_the_bodies_described_are_those_that_are_parsed(served: Served):
    schemas = (await served.http.get("/openapi.json")).json()["components"]["schemas"]
    fields = {f.encode_name for f in msgspec.structs.fields(ChatRequest)}
    assert set(schemas["ChatRequest"]["properties"]) == fields
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert set(schemas["ChatRequest"]["required"]) == {"model", "messages"}
    for name in REFUSED_CHAT.keys() - REFUSED.keys():
        assert "enum" in schemas["ChatRequest"]["properties"][name], name


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_schemathesis_is_clean(start, tmp_path):
    keys = tmp_path / "keys.json"
    _, key = api_keys.create(keys, "acme", "admin")
    async with start(api_keys_file=keys, key=key, adapter_wait=0.2) as served:
        described = (await served.http.get("/openapi.json")).json()
        for schema in described["components"]["schemas"].values():
            if "model" in schema["properties"] and "messages" in schema["properties"]:
                schema["properties"]["model"] = {"const": MODEL}  # so that it is answered
            for asked in ("prompt", "input"):
                if asked in schema["properties"] and "model" in schema["properties"]:
                    schema["properties"]["model"] = {"const": MODEL}
        file = tmp_path / "openapi.json"
        file.write_text(json.dumps(described))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            str(file),
            "--url",
            served.url,
            "--header",
            f"Authorization: Bearer {key}",
            "--checks",
            CHECKS,
            "--phases",
            "examples,fuzzing",
            "--max-examples",
            "12",
            "--seed",
            "1",
            "--no-color",
            "--max-failures",
            "20",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
        assert served.answerer.seen, "some bodies were good enough to be answered"
        assert (await served.chat()).status_code == 200
