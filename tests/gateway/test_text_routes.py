"""Tokenizing over HTTP, the version, and routes that are refused clearly."""

from __future__ import annotations

from tests.gateway.conftest import MODEL, Served


async def test_tokenize_and_detokenize_are_each_others_inverse(served: Served):
    text = "Köln 😀"
    response = await served.http.post("/tokenize", json={"model": MODEL, "prompt": text})
    found = response.json()
    assert found["count"] == len(found["tokens"]) == len(text.encode())
    assert found["max_model_len"] == 512
    back = await served.http.post("/detokenize", json={"model": MODEL, "tokens": found["tokens"]})
    assert back.json() == {"prompt": text}


async def test_a_chat_is_tokenized_as_it_would_be_asked(served: Served):
    messages = [{"role": "user", "content": "Hello"}]
    await served.chat(messages=messages)
    response = await served.http.post("/tokenize", json={"model": MODEL, "messages": messages})
    assert tuple(response.json()["tokens"]) == served.answerer.seen[0].prompt


CASES_WHAT_CANNOT_BE_DONE_IS_REFUS = [
    ("/tokenize", {"model": MODEL}, 400),
    ("/tokenize", {"model": MODEL, "prompt": "a", "messages": []}, 400),
    ("/tokenize", {"model": "x", "prompt": "a"}, 404),
    ("/detokenize", {"model": MODEL, "tokens": [99999]}, 400),
    ("/detokenize", {"model": MODEL, "tokens": ["a"]}, 400),
    ("/v1/embeddings", {"model": MODEL, "input": "x"}, 404),
]


async def test_what_cannot_be_done_is_refused_in_the_usual_shape(served):
    for path, body, status in CASES_WHAT_CANNOT_BE_DONE_IS_REFUS:
        response = await served.http.post(path, json=body)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_the_version_is_told(served: Served):
    assert set((await served.http.get("/version")).json()) == {"version"}


async def test_metrics_carry_vllms_names_with_our_prefix(served: Served):
    await served.chat(stream=True)
    text = (await served.http.get("/metrics")).text
    for name in (
        "collm_num_requests_running",
        "collm_num_requests_waiting",
        "collm_prompt_tokens_total",
        "collm_generation_tokens_total",
        'collm_request_success_total{engine="torch",finished_reason="stop",model_name="tiny"} 1.0',
        "collm_time_to_first_token_seconds_bucket",
        "collm_inter_token_latency_seconds_bucket",
        "collm_e2e_request_latency_seconds_count",
        "collm_request_params_max_tokens_sum",
        "collm_stream_length",
    ):
        assert name in text, name
