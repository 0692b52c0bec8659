"""The openai client against a running system with a real (tiny) model."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.system.running import System

QUESTION = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(real: System) -> openai.OpenAI:
    return real.client()


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list().data] == ["tiny"]


def test_a_chat_is_answered_with_its_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    # "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", a token a byte
    assert answer.usage.prompt_tokens == 1 + 5 + 5 + 1 + 1 + 1 + 10
    assert answer.usage.total_tokens == 8 + answer.usage.prompt_tokens


def test_streamed_pieces_are_the_whole_answer(client: openai.OpenAI) -> None:
    options = {
        "model": "tiny",
        "messages": QUESTION,
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert len({c.id for c in chunks}) == 1


def test_greedy_answers_repeat_and_seeded_ones_too(client: openai.OpenAI) -> None:
    for options in ({"temperature": 0}, {"temperature": 1, "seed": 7}):
        answers = {
            client.completions.create(model="tiny", prompt="abc", max_tokens=12, **options)
            .choices[0]
            .text
            for _ in range(3)
        }
        assert len(answers) == 1, options


def test_a_completion_takes_text_lists_and_token_ids(client: openai.OpenAI) -> None:
    two = client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=2)
    assert sorted(c.index for c in two.choices) == [0, 1]
    ids = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=2)
    assert ids.usage.prompt_tokens == 3


def test_n_gives_that_many_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4, n=3)
    assert sorted(c.index for c in answer.choices) == [0, 1, 2]


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    assert caught.value.request_id


def test_a_prompt_over_the_context_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a" * 600, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"n": 0},
        {"temperature": -1},
        {"extra_body": {"unheard_of": 1}},
    ],
)
def test_a_bad_parameter_is_refused(client: openai.OpenAI, wrong: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=QUESTION, **wrong)
    assert caught.value.type == "invalid_request_error"


def test_broken_json_is_answered_in_the_same_shape(real: System) -> None:
    reply = httpx.post(f"{real.url}/v1/chat/completions", content=b"{")
    assert reply.status_code == 400
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["x-request-id"]


def test_nothing_is_left_in_the_streams(real: System, client: openai.OpenAI) -> None:
    client.completions.create(model="tiny", prompt="abc", max_tokens=4)
    found = real.await_drained()
    assert found["streams"], "the streams exist even when they are empty"
    assert [(r["id"], r["state"], r["model"]) for r in found["replicas"]] == [
        ("replica-0", "serving", "tiny")
    ]
