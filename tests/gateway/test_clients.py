"""Clients that others wrote: LangChain, and the openai client's own repetitions."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from services.gateway.errors import overloaded
from shared.messages import Failed
from tests.gateway.answerer import says
from tests.gateway.conftest import MODEL, Served


def langchain(served: Served, kind: str = "ChatOpenAI", **options: object):
    import langchain_openai  # seconds: not while tests are collected

    return getattr(langchain_openai, kind)(
        model=MODEL,
        base_url=f"{served.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.Client(verify=False),
        http_async_client=httpx.AsyncClient(verify=False),
        **options,
    )


async def test_langchain_gets_answers_with_usage_and_finish_reason(served: Served):
    answer = await langchain(served).ainvoke([("system", "Be brief."), ("human", "Hello")])
    assert answer.content == "Hello there!"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] == 13
    text = await langchain(served, "OpenAI").ainvoke("Hello")
    assert text == "Hello there!"


async def test_langchain_streams(served: Served):
    chunks = [c async for c in langchain(served, stream_usage=True).astream("Hello")]
    assert "".join(c.content for c in chunks) == "Hello there!"
    assert sum((c.usage_metadata or {}).get("output_tokens", 0) for c in chunks) == 13


async def test_langchain_reads_structured_answers(served: Served):
    served.answerer.script = says('{"colour":"red"}')
    schema = {
        "title": "colour",
        "type": "object",
        "properties": {"colour": {"type": "string"}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    model = langchain(served).with_structured_output(schema, method="json_schema")
    assert await model.ainvoke("Name one") == {"colour": "red"}
    assert json.loads(served.answerer.seen[0].sampling.grammar)["required"] == ["colour"]


async def test_langchain_raises_what_it_is_told(served: Served):
    with pytest.raises(openai.NotFoundError):
        await langchain(served).bind(model="other").ainvoke("Hello")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await langchain(served, temperature=9).ainvoke("Hello")
    served.answerer.script = says("never")
    served.answerer.reply = lambda g: [
        Failed(id=g.id, attempt=g.attempt, status=503, message="shed", type="x", code="y")
    ]
    with pytest.raises(openai.InternalServerError, match="shed"):
        await langchain(served).ainvoke("Hello")


async def test_the_client_repeats_what_may_succeed_and_not_what_was_shed(served: Served):
    """x-should-retry decides: 503 of an overload comes at once, a passing 503 is tried again."""
    tries: list[str] = []

    def fail(retry: bool | None, status: int = 503):
        def reply(request):
            tries.append(request.id)
            if len(tries) > 1:
                return None  # answered
            return [
                Failed(
                    id=request.id,
                    attempt=request.attempt,
                    status=status,
                    message="busy",
                    type="service_unavailable_error",
                    code="x",
                )
            ]

        return reply

    client = served.openai.with_options(max_retries=3)

    async def ask() -> str:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a"}]
        )
        return answer.choices[0].message.content

    served.answerer.reply = fail(None, 500)
    assert await ask() == "Hello there!"
    assert len(tries) == 2
    tries.clear()
    served.answerer.reply = fail(False)
    with pytest.raises(openai.InternalServerError):
        await ask()
    assert len(tries) == 1
    assert (b"x-should-retry", b"false") in overloaded("full", 1.0).headers()


async def test_a_request_that_is_repeated_after_a_broken_connection_is_answered_anew(
    served: Served,
):
    """The client's own id comes back each time; two of the same never clash."""
    bodies = await asyncio.gather(
        *[
            served.http.post(
                "/v1/completions",
                json={"model": MODEL, "prompt": "a"},
                headers={"x-request-id": "mine", "x-stainless-retry-count": str(i)},
            )
            for i in range(3)
        ]
    )
    assert {r.status_code for r in bodies} == {200}
    assert {r.headers["x-request-id"] for r in bodies} == {"mine"}
    assert len({r.json()["id"] for r in bodies}) == 3
