"""Whole runs against a real HTTP server."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadgen import cli
from loadgen.client import Client, HttpError
from tests.loadgen.fake_server import FakeServer, running

MUST_HAVE = {
    "shed",
    "std_itl_ms",
    "output_throughput",
    "p99_ttft_ms",
    "failed",
    "quality_coverage",
    "request_goodput",
    "q_goodput",
    "p50_ttft_ms",
    "duration",
    "p99_itl_ms",
    "p50_tpot_ms",
    "request_throughput",
    "client_lag_p99_ms",
    "median_itl_ms",
    "goodput_tokens_per_s",
    "active_duration",
    "active_goodput_tokens_per_s",
    "by_second",
    "mean_itl_ms",
    "max_concurrent_requests",
    "total_output_tokens",
    "max_output_tokens_per_s",
    "slo_attainment",
    "completed",
    "total_token_throughput",
    "p99_tpot_ms",
    "p99_e2el_ms",
    "total_input_tokens",
}


@pytest.fixture
async def fake() -> AsyncIterator[FakeServer]:
    async with running() as server:
        yield server


async def run(fake: FakeServer, *arguments: str) -> dict[str, Any]:
    base = ["--base-url", fake.url, "--no-progress"]
    if "--trace" not in arguments:
        base += ["--request-rate", "inf"]
    options = cli.options(cli.parser().parse_args([*base, *arguments]))
    return await cli.replay(options, Console(file=io.StringIO()))


async def test_a_run_reports_every_promised_key(fake: FakeServer) -> None:
    result = await run(fake, "--limit", "20", "--output-tokens", "5", "--goodput", "e2el:60000")
    assert set(result) >= MUST_HAVE
    assert (result["completed"], result["failed"], result["shed"]) == (20, 0, 0)
    assert result["total_output_tokens"] == 100
    assert result["tokens_counted_by"] == "usage"
    assert result["slo_attainment"] == 1.0
    assert result["q_goodput"] is None
    assert sum(result["by_second"]["output_tokens"]) == pytest.approx(100, abs=0.1)


async def test_without_usage_the_pieces_are_counted_and_that_is_stated(fake: FakeServer) -> None:
    fake.mode = "no_usage"
    result = await run(fake, "--limit", "3", "--output-tokens", "5")
    assert result["total_output_tokens"] == 15
    assert result["tokens_counted_by"] == "chunks"


async def test_refused_requests_are_shed_not_failed(fake: FakeServer) -> None:
    fake.mode = "refuse"
    result = await run(fake, "--limit", "4")
    assert (result["completed"], result["failed"], result["shed"]) == (0, 0, 4)
    assert result["slo_attainment"] == 0.0
    assert result["errors_by_kind"] == {"HTTP 503: queue full": 4}


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("cut", "without [DONE]"),
        ("error", "the replica is gone"),
        ("broken", "unreadable answer"),
    ],
)
async def test_a_broken_answer_is_a_failure(fake: FakeServer, mode: str, error: str) -> None:
    fake.mode = mode
    result = await run(fake, "--limit", "2", "--output-tokens", "4")
    assert (result["completed"], result["failed"]) == (0, 2)
    assert error in next(iter(result["errors_by_kind"]))


async def test_a_slow_answer_ends_at_the_timeout(fake: FakeServer) -> None:
    fake.mode = "slow"
    result = await run(fake, "--limit", "2", "--timeout", "0.2")
    assert result["failed"] == 2
    assert "within 0.2 s" in next(iter(result["errors_by_kind"]))


async def test_a_slow_server_does_not_slow_the_arrivals_down(fake: FakeServer) -> None:
    fake.mode = "slow"
    task = asyncio.create_task(run(fake, "--limit", "30", "--output-tokens", "1"))
    async with asyncio.timeout(90):
        await fake.asked(30)
    fake.release.set()
    result = await task
    assert result["max_concurrent_requests"] == 30
    assert result["completed"] == 30


async def test_max_concurrency_bounds_what_is_in_flight(fake: FakeServer) -> None:
    result = await run(fake, "--limit", "30", "--max-concurrency", "3")
    assert result["max_concurrent_requests"] <= 3
    assert result["completed"] == 30


async def test_a_server_that_closes_each_connection_is_served_too(fake: FakeServer) -> None:
    fake.mode = "close"
    result = await run(fake, "--limit", "6", "--max-concurrency", "1")
    assert result["completed"] == 6


async def test_a_trace_gives_times_lengths_and_tags(fake: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:03.0000000,10,3\r\n2023-11-16 18:17:05.0000000,20,7"
    )
    result = await run(
        fake,
        "--trace",
        f"code={trace}",
        "--trace",
        f"conv={trace}",
        "--rate-scale",
        "10",
        "--ignore-eos",
    )
    assert result["completed"] == 4
    assert set(result["tags"]) == {"code", "conv"}
    assert result["tags"]["code"]["total_output_tokens"] == 10
    assert [body["max_tokens"] for body in fake.bodies] == [3, 3, 7, 7]
    assert all(body["ignore_eos"] for body in fake.bodies)
    assert [len(body["messages"][-1]["content"]) for body in fake.bodies] == [40, 40, 80, 80]
    assert result["duration"] >= 0.2


async def test_adapters_headers_key_and_extra_body_are_sent(fake: FakeServer) -> None:
    await run(
        fake, "--limit", "4", "--lora-modules", "a", "b", "--lora-assignment", "round-robin",
        "--goodput", "ttft:200", "e2el:2s", "--slo-headers", "--api-key", "secret",
        "--extra-body", '{"top_p": 0.5}',
    )  # fmt: skip
    assert sorted(body["model"] for body in fake.bodies) == ["a", "a", "b", "b"]
    assert all(body["top_p"] == 0.5 for body in fake.bodies)
    assert fake.headers[0]["x-slo-ttft-ms"] == "200"
    assert fake.headers[0]["x-slo-e2e-ms"] == "2000"
    assert fake.headers[0]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("extra", [["--no-stream"], ["--endpoint", "/v1/completions"]])
async def test_other_endpoints_are_understood(fake: FakeServer, extra: list[str]) -> None:
    result = await run(fake, "--limit", "3", "--output-tokens", "4", *extra)
    assert result["completed"] == 3
    assert result["total_output_tokens"] == 12


async def test_details_keep_references_and_never_the_key(fake: FakeServer, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        "\n".join(
            json.dumps({"messages": [{"role": "user", "content": f"q{k}"},
                                     {"role": "assistant", "content": f"a{k}"}]})
            for k in range(40)
        )
    )  # fmt: skip
    result = await run(
        fake,
        "--limit",
        "5",
        "--prompts",
        str(chats),
        "--save-detailed",
        "--api-key",
        "secret",
        "--output-tokens",
        "2",
    )
    request = result["requests"][0]
    reference = result["references"][request["sample"]]
    assert reference["reference"] == "a" + reference["messages"][-1]["content"][1:]
    assert result["generated_texts"][0] == "wörd0 wörd1 "
    assert request["headers"]["x-request-id"].startswith("r")
    assert "secret" not in json.dumps(result)


async def test_stopping_ends_the_run_and_keeps_what_came(fake: FakeServer) -> None:
    fake.mode = "slow"
    options = cli.options(
        cli.parser().parse_args(["--base-url", fake.url, "--request-rate", "1", "--limit", "9"])
    )
    client = Client(fake.url)
    driver = cli.Driver(options, client, cli.make_prompts(options), cli.schedule(options), "fake")
    task = asyncio.create_task(driver.run())
    async with asyncio.timeout(90):
        await fake.asked(1)
    driver.stop()
    await task
    assert driver.interrupted
    assert 1 <= len(driver.outcomes) < 9
    assert all(not outcome.ok for outcome in driver.outcomes)


async def test_no_server_is_a_clear_error() -> None:
    client = Client("http://127.0.0.1:9")
    with pytest.raises(HttpError, match=r"no connection to 127\.0\.0\.1:9"):
        await cli.served(client)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--trace FILE"),
        (["--request-rate", "5"], "never ends"),
        (["--request-rate", "-1", "--limit", "3"], "above 0"),
        (["--request-rate", "1", "--limit", "0"], "--limit must be above 0"),
        (["--request-rate", "1", "--limit", "1", "--goodput", "x:1"], "SLO"),
        (["--request-rate", "1", "--limit", "1", "--extra-body", "{"], "not JSON"),
        (["--request-rate", "1", "--limit", "1", "--metadata", "novalue"], "NAME=VALUE"),
        (["--request-rate", "1", "--limit", "1", "--base-url", "localhost:8000"], "base URL"),
        (["--trace", "/absent.csv"], "absent.csv"),
    ],
)
def test_bad_arguments_end_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("sent", [False, True])
async def test_limits_that_are_not_sent_are_noted(fake: FakeServer, sent: bool) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadgen", "--base-url", fake.url, "--request-rate", "inf",
        "--limit", "1", "--goodput", "ttft:1000", *(["--slo-headers"] if sent else []),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err
    assert (b"without --slo-headers the server is not told" in err) is not sent
    assert json.loads(out)["completed"] == 1


async def test_the_command_prints_one_json_line_and_saves_it(
    fake: FakeServer, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadgen", "--base-url", fake.url, "--request-rate", "200",
        "--limit", "10", "--save-result", "--result-dir", str(tmp_path), "--metadata", "run=7",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err
    printed = json.loads(out)
    (saved,) = tmp_path.glob("*.json")
    assert json.loads(saved.read_text())["completed"] == printed["completed"] == 10
    assert printed["run"] == "7"
    assert b"SLO attainment" in err
