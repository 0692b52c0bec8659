"""Traces: off unless asked for; when on, one a request, with the client's trace as its parent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from services.gateway.settings import GatewaySettings
from services.gateway.tracing import tracer
from shared.messages import Failed, Output, StepReply
from shared.settings import SettingsError
from tests.gateway.answerer import until
from tests.gateway.conftest import MODEL, Served, Start
from tests.gateway.test_resilience import loses_first

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `otel` is not installed")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
trace = pytest.importorskip("opentelemetry.trace")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-2] + "00"
TRACE, SPAN = int(PARENT.split("-")[1], 16), int(PARENT.split("-")[2], 16)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch):
    """What a tracing gateway would export."""
    exporter = memory.InMemorySpanExporter()
    monkeypatch.setattr(
        "services.gateway.spans.exporting", lambda: export.SimpleSpanProcessor(exporter)
    )
    return exporter


def stamped(served: Served, **stamps: float) -> None:
    """Answers in one step, with these stamps, seconds after the request's arrival."""

    def reply(request):
        output = Output(
            id=request.id,
            attempt=request.attempt,
            offset=0,
            tokens=(70, 71, 72),
            finish="length",
            stamps={k: request.arrival + v for k, v in stamps.items()},
        )
        return [StepReply(replica="replica-7", outputs=(output,))]

    served.answerer.reply = reply


LIFE = {
    "received": 0.0,
    "queued": 0.001,
    "released": 0.01,
    "started": 0.02,
    "first_token": 0.04,
    "finished": 0.08,
}


async def finished(exporter, name: str = "POST /v1/chat/completions"):
    """The spans by name, once the request's own has ended (after its last byte)."""
    await until(lambda: any(s.name == name for s in exporter.get_finished_spans()), name)
    found = exporter.get_finished_spans()
    return {s.name: s for s in found}


async def test_a_trace_has_a_span_for_each_phase_of_each_service(start: Start, spans):
    async with start(tracing=True) as served:
        stamped(served, **LIFE)
        headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
        answer = await served.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
        found = await finished(spans)
    root, generate = found["POST /v1/chat/completions"], found["generate"]
    assert {s.context.trace_id for s in found.values()} == {TRACE}
    assert root.parent.span_id == SPAN
    assert root.context.trace_state.get("vendor") == "1"
    assert generate.parent.span_id == root.context.span_id
    services = {}
    for name in ("queue", "release", "prefill", "decode", "finish"):
        assert found[name].parent.span_id == generate.context.span_id
        services[name] = found[name].resource.attributes["service.name"]
    assert services == {
        "queue": "collm-dispatcher",
        "release": "collm-replica",
        "prefill": "collm-replica",
        "decode": "collm-replica",
        "finish": "collm-gateway",
    }
    millis = {n: round((found[n].end_time - found[n].start_time) / 1e6) for n in services}
    del millis["finish"]
    assert millis == {"queue": 10, "release": 10, "prefill": 20, "decode": 40}
    assert found["decode"].attributes["collm.replica"] == "replica-7"
    assert [e.name for e in found["queue"].events] == ["read"]
    assert generate.attributes["gen_ai.usage.output_tokens"] == 3
    assert generate.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert root.attributes["http.response.status_code"] == 200
    assert root.start_time <= generate.start_time
    assert served.answerer.seen[0].traceparent == (
        f"00-{TRACE:032x}-{root.context.span_id:016x}-01"
    )


async def test_without_a_traceparent_or_with_a_bad_one_a_trace_begins_here(start: Start, spans):
    async with start(tracing=True) as served:
        for given in (None, "00-zz-11-01", "rubbish"):
            headers = {} if given is None else {"traceparent": given}
            body = {"model": MODEL, "prompt": "a", "max_tokens": 3}
            assert (
                await served.http.post("/v1/completions", json=body, headers=headers)
            ).status_code == 200
        own = "POST /v1/completions"

        def roots():
            return [s for s in spans.get_finished_spans() if s.name == own]

        await until(lambda: len(roots()) == 3, "three traces")
    assert all(s.parent is None for s in roots())
    assert len({s.context.trace_id for s in roots()}) == 3


async def test_a_caller_who_does_not_sample_is_not_traced(start: Start, spans):
    async with start(tracing=True) as served:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 3}
        headers = {"traceparent": UNSAMPLED}
        await served.http.post("/v1/completions", json=body, headers=headers)
        assert served.answerer.seen[0].traceparent.endswith("-00")
        await served.http.post("/v1/completions", json=body)
        found = await finished(spans, "POST /v1/completions")
    assert TRACE not in {s.context.trace_id for s in found.values()}


async def test_errors_are_in_the_trace_with_their_status_and_without_the_prompt(
    start: Start, spans
):
    async with start(tracing=True) as served:
        assert (await served.chat(temperature=99, user="Zanzibar")).status_code == 400
        bad = (await finished(spans))["POST /v1/chat/completions"]
        spans.clear()
        served.answerer.reply = lambda r: [
            Failed(id=r.id, attempt=r.attempt, status=500, code="broke", message="it broke")
        ]
        assert (await served.chat()).status_code == 500
        found = await finished(spans)
    assert bad.attributes["http.response.status_code"] == 400
    assert bad.status.status_code == trace.StatusCode.UNSET, "a 4xx is no fault of the server"
    root = found["POST /v1/chat/completions"]
    assert root.attributes["http.response.status_code"] == 500
    assert root.attributes["error.type"] == "broke"
    assert root.status.status_code == trace.StatusCode.ERROR
    assert found["generate"].status.status_code == trace.StatusCode.ERROR
    assert "decode" not in found, "nobody knows when it would have been"
    text = bad.to_json() + "".join(s.to_json() for s in found.values())
    assert "Zanzibar" not in text
    assert "Hello" not in text


async def test_a_lost_attempt_is_an_event_of_the_same_trace(start: Start, spans):
    async with start(tracing=True) as served:
        loses_first(served, 1)
        assert (await served.chat()).status_code == 200
        found = await finished(spans)
    generate = found["generate"]
    assert generate.attributes["collm.attempt"] == 2
    assert [(e.name, e.attributes.get("collm.replica")) for e in generate.events] == [
        ("first_token", None),
        ("lost", "r0"),
    ]
    first, second = served.answerer.seen
    assert first.traceparent == second.traceparent != ""


async def test_by_default_nothing_is_traced_and_nothing_travels(served: Served):
    assert served.gateway.tracer is None
    headers = {"traceparent": PARENT}
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3}
    await served.http.post("/v1/completions", json=body, headers=headers)
    assert served.answerer.seen[0].traceparent == ""


def test_by_default_no_exporter_is_imported():
    """(FastAPI and redis-py look for OpenTelemetry's interfaces by themselves.)"""
    code = (
        "import sys, services.gateway.__main__; "
        "from services.gateway.service import Gateway; "
        "from services.gateway.settings import GatewaySettings; Gateway(GatewaySettings()); "
        "bad = [m for m in sys.modules if m.startswith('opentelemetry.exporter')]; "
        "assert not bad, bad; assert 'services.gateway.spans' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")],
)
def test_what_the_variables_ask_for_and_is_not_there_stops_the_start(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=rf"{name}: '{value}' is not supported"):
        tracer(GatewaySettings(tracing=True), "g", lambda: 0.0)


def test_a_missing_package_stops_the_start_and_names_the_remedy():
    code = (
        "import sys; sys.modules['opentelemetry.exporter'] = None; "
        "from services.gateway.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "COLLM_GATEWAY_TRACING": "true"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "pip install 'collm[otel]'" in done.stderr
    assert "Traceback" not in done.stderr
