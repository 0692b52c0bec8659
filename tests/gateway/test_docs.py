"""Every example of docs/api.md is run against a real gateway."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

import httpx
import pytest

from tests.gateway.answerer import answering, register, says
from tests.gateway.replica import controlled
from tests.gateway.test_lora import write_adapter

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
MODEL = "SmolLM2-135M-Instruct"
ADDRESS = "http://127.0.0.1:8000"
EXAMPLES = re.findall(r"```(bash|python)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


@pytest.fixture
async def documented(start, redis, tiny_folder, tmp_path):
    """The model of the page, with one replica that loads adapters and keeps data."""
    write_adapter(tmp_path / "adapters" / "incoming" / "law")
    await register(redis, MODEL, tiny_folder)
    tenants = {"": {"feedback_adapter": "desk"}}
    async with (
        start(tenants=tenants) as served,
        answering(redis, MODEL, says("A queue.")),
        controlled(redis, f"{MODEL}-r0", tmp_path),
        controlled(redis, "tiny-r0", tmp_path),
    ):
        await redis.srem("collm:models", "tiny")
        await served.gateway.catalogue.refresh()
        yield served


def test_the_page_has_examples():
    assert len(EXAMPLES) >= 10


async def test_every_example_of_the_page_works(documented):
    for language, code in EXAMPLES:
        code = code.replace(ADDRESS, documented.url)
        if language == "python":
            await asyncio.to_thread(exec, compile(code, str(PAGE), "exec"), {})
        else:
            response = await curl(documented.http, code)
            assert response.status_code == 200, (code, response.text)


async def curl(http: httpx.AsyncClient, code: str) -> httpx.Response:
    """What the curl line would send."""
    words = shlex.split(code.replace("\\\n", " "))
    assert words[0] == "curl"
    url, method, headers, body = "", "GET", {}, None
    rest = iter(words[1:])
    for word in rest:
        if word == "-X":
            method = next(rest)
        elif word == "-H":
            name, _, value = next(rest).partition(":")
            headers[name] = value.strip()
        elif word == "-d":
            method, body = "POST", next(rest)
        else:
            url = word
    return await http.request(method, url, headers=headers, content=body)
