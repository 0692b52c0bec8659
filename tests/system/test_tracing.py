"""A trace of a real request through real processes, as a collector receives it over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.running import System

otlp = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    reason="the extra `otel` is not installed",
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An OTLP collector: its address, and the spans received as (service, span)."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            request = otlp.ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                named = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    received.extend((named["service.name"], span) for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_collector_receives_one_trace_of_all_services(tmp_path: Path, tiny_folder: Path) -> None:
    options = ("--engine", "emulated", "--profile", "zero", "--no-train")
    model = ("--model", f"{tiny_folder}:1", "--served-model-name", "tiny")
    with collector() as (url, received):
        variables = {
            "COLLM_GATEWAY_TRACING": "true",
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_SERVICE_NAME": "shop",
        }
        with System(tmp_path, *options, *model, variables=variables) as system:
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 5, "ignore_eos": True}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            answer = httpx.post(f"{system.url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
        # The end of the gateway has sent what was left.
    ours = [(service, s) for service, s in received if s.trace_id.hex() == TRACE]
    by_name = {s.name: (service, s) for service, s in ours}
    assert {name: service for name, (service, _) in by_name.items()} == {
        "POST /v1/completions": "shop-gateway",
        "generate": "shop-gateway",
        "queue": "shop-dispatcher",
        "release": "shop-replica",
        "prefill": "shop-replica",
        "decode": "shop-replica",
        "finish": "shop-gateway",
    }
    root = by_name["POST /v1/completions"][1]
    assert root.parent_span_id.hex() == PARENT
    order = ("queue", "release", "prefill", "decode", "finish")
    for one, next_one in pairwise(order):
        assert by_name[one][1].end_time_unix_nano <= by_name[next_one][1].end_time_unix_nano
    attributes = {a.key: a.value for a in by_name["generate"][1].attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5
    assert attributes["collm.emulated"].bool_value is True
    assert attributes["collm.replica"].string_value == "replica-0"
