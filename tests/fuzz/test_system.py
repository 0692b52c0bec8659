"""A running system against rubbish: over HTTP and in every stream. Nothing crashes, no 500."""

import json
import os
import random

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import names
from shared.messages import BODY
from tests import tiny
from tests.system.running import System

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
pytestmark = [pytest.mark.timeout(3600 if EXAMPLES > 1000 else 180)]


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    folder = tiny.write_config(tmp_path_factory.mktemp("model") / "tiny")
    options = ["--engine", "emulated", "--profile", "zero", "--model", str(folder)]
    options += ["--replicas", "2", "--no-train"]
    with System(tmp_path_factory.mktemp("fuzz"), *options) as running:
        yield running


@pytest.fixture(scope="module")
def client(system):
    with httpx.Client(base_url=system.url, timeout=60.0) as http:
        yield http


def assert_alive(client: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}
    assert client.post("/v1/completions", json=body).status_code == 200


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from(["tiny", "user", "assistant", "system", "auto", "json_object"])
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
PARAMETERS = """
    model messages prompt max_tokens max_completion_tokens temperature top_p top_k seed stop
    n stream stream_options ignore_eos min_tokens logprobs top_logprobs echo suffix tools
    tool_choice response_format slo user logit_bias presence_penalty frequency_penalty
    best_of repetition_penalty min_p metadata priority unknown
""".split()  # noqa: SIM905 - one a line would fill a screen


@st.composite
def bodies(draw):
    """A right call with some parameters replaced by anything."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "prompt": "hello",
        "max_tokens": 2,
    }
    body.pop(draw(st.sampled_from(["messages", "prompt"])))
    for name in draw(st.lists(st.sampled_from(PARAMETERS), max_size=3)):
        body[name] = draw(values)
    return body


@fuzz
@given(bodies(), st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
def test_any_parameters_are_answered_or_refused_by_name(client, body, path):
    raw = json.dumps(body, ensure_ascii=True).encode()
    response = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code < 500, (response.status_code, response.text, body)
    assert response.headers["x-request-id"]
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) >= {"message", "type", "param", "code"}


@fuzz
@given(
    st.binary(max_size=200),
    st.sampled_from(["POST", "GET", "PUT", "DELETE", "PATCH"]),
    st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/x", "/health"]),
)
def test_any_bytes_by_any_method_get_an_error_object(client, raw, method, path):
    response = client.request(method, path, content=raw)
    assert response.status_code < 500, (response.status_code, response.text)
    if response.status_code >= 400:
        assert set(response.json()["error"]) >= {"message", "type", "param", "code"}


async def test_rubbish_in_every_stream_stops_nothing(system, client):
    from shared.redis_client import connect

    redis, dice = connect(system.redis_url), random.Random(3)
    gateways = [g.decode() for g in await redis.smembers(names.GATEWAYS)]
    streams = [
        names.requests("tiny"),
        names.dispatcher_control("tiny"),
        names.batches("replica-0"),
        names.control("replica-0"),
        names.METRICS,
        names.EVENTS,
        *(names.replies(g) for g in gateways),
    ]
    for _ in range(EXAMPLES):
        rubbish = dice.randbytes(dice.randrange(1, 120))
        fields = dice.choice([{BODY: rubbish}, {rubbish: rubbish}, {b"id": rubbish, BODY: b""}])
        await redis.xadd(dice.choice(streams), fields, nomkstream=True)
    assert_alive(client)
    queues = system.await_drained(20.0)
    assert queues["replicas"][0]["state"] == "serving"
    assert await redis.xlen(names.DEAD_LETTERS) > 0
    await redis.aclose()
