"""`collm up` as a whole: starts, tells, survives kills, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import redis

from collm.up.logfile import LOG_BYTES
from shared.settings import child_environment
from tests.system.running import System, gone
from tests.tiny import write_adapter

EMULATED = ("--engine", "emulated", "--no-train", "--served-model-name", "tiny")


def _await(condition: object, what: str, seconds: float = 120.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what


def test_the_json_line_names_every_process(emulated: System) -> None:
    facts = emulated.facts
    assert set(facts) == {"url", "redis", "data_dir", "pids", "metrics"}
    assert {"redis", "gateway", "dispatcher", "replica-0", "replica-1"} <= set(facts["pids"])
    for pid in facts["pids"].values():
        assert psutil.pid_exists(pid)


def test_up_json_names_the_metrics_page_of_every_process(emulated: System) -> None:
    parts = {"gateway", "dispatcher", "replica-0", "replica-1"}
    _await(lambda: set(emulated.now()["metrics"]) == parts, "a page is missing")
    for part, url in emulated.now()["metrics"].items():
        series = "collm_engine_info" if part.startswith("replica") else "collm_"
        assert series in httpx.get(url, timeout=60).text, part


def test_redis_has_a_bound_and_evicts_nothing(emulated: System) -> None:
    with redis.Redis.from_url(emulated.redis_url, decode_responses=True) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(2 << 30)}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_a_drained_replica_comes_back_when_it_is_wanted(tmp_path: Path, tiny_folder: Path) -> None:
    with System(tmp_path, *EMULATED, "--model", f"{tiny_folder}:2") as system:
        system.await_serving()
        first = system.pids()["replica-0"]
        assert "replica-0 has stopped" in system.collm("drain", "replica-0")
        _await(lambda: system.pids()["replica-0"] is None, "it stays")
        assert "`collm undrain replica-0` starts it again" in system.log.read_text()
        assert "replica-0 serves again" in system.collm("undrain", "replica-0")
        second = system.pids()["replica-0"]
        assert second not in (None, first)
        assert "serves again" in system.collm("drain", "replica-0", "--restart")
        assert system.pids()["replica-0"] not in (None, first, second)
        system.await_serving()
        system.await_drained()
        assert "died" not in system.log.read_text()


def test_a_log_is_cut_while_the_system_runs(tmp_path: Path, tiny_folder: Path) -> None:
    with System(tmp_path, *EMULATED, "--model", f"{tiny_folder}:1") as system:
        log = tmp_path / "logs" / "gateway.log"
        with log.open("ab") as more:
            more.truncate(LOG_BYTES + 1)
        _await(lambda: log.stat().st_size < LOG_BYTES, "not cut")
        assert (tmp_path / "logs" / "gateway.log.1").stat().st_size > LOG_BYTES
        assert system.process.poll() is None


def test_a_setting_that_any_service_refuses_is_told_before_anything_starts(
    tmp_path: Path, tiny_folder: Path
) -> None:
    (tmp_path / "collm.yaml").write_text("coordinator: {training: {local_stepz: 2}}\n")
    command = [sys.executable, "-m", "collm", "up", "--data-dir", str(tmp_path), "--port", "0"]
    command += ["--model", str(tiny_folder), "--engine", "emulated"]
    environment = child_environment({"PYTHONPATH": str(Path(__file__).resolve().parents[2])})
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 1
    assert "coordinator would not start" in result.stderr
    assert "training.local_stepz" in result.stderr
    assert not (tmp_path / "redis").exists()
    assert not (tmp_path / "logs").exists()


def test_an_open_address_is_served_where_that_is_wanted(tmp_path: Path, tiny_folder: Path) -> None:
    options = (*EMULATED, "--model", f"{tiny_folder}:1", "--host", "0.0.0.0")
    variables = {"COLLM_GATEWAY_ALLOW_OPEN": "true"}
    with System(tmp_path, *options, variables=variables) as system:
        port = system.url.rpartition(":")[2]
        assert system.url == f"http://127.0.0.1:{port}"
        found = psutil.Process(system.pids()["gateway"]).net_connections("tcp")
        bound = [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]
        assert bound == ["0.0.0.0"]


def test_queues_json_has_the_promised_shape(emulated: System) -> None:
    found = emulated.queues()
    assert set(found) == {"streams", "replicas"}
    for stream in found["streams"].values():
        assert set(stream) == {"length", "pending"}
    for replica in found["replicas"]:
        assert set(replica) == {"id", "state", "model", "b", "in_flight", "adapters"}


def test_emulated_answers_are_marked(emulated: System) -> None:
    model = httpx.get(f"{emulated.url}/v1/models").json()["data"][0]
    assert model["emulated"] is True


def test_many_requests_at_once_are_all_answered_and_drained(emulated: System) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 5, "ignore_eos": True}
    tokens: list[int] = []

    def ask() -> None:
        with httpx.Client(base_url=emulated.url, timeout=60) as client:
            for _ in range(10):
                reply = client.post("/v1/completions", json=body)
                tokens.append(reply.json()["usage"]["completion_tokens"])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokens == [5] * 80
    emulated.await_drained()


def test_a_second_system_on_the_same_folder_is_refused(emulated: System, tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "collm", "up", "--data-dir", str(emulated.data)]
    command += ["--port", "0", "--model", str(tiny_folder), *EMULATED]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "in use by another" in result.stderr


def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path, tiny_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "collm", "up", "--data-dir", str(tmp_path)]
        command += ["--port", port, "--model", str(tiny_folder), *EMULATED]
        result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert not (tmp_path / "redis").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_and_leaves_no_process(
    tmp_path: Path, tiny_folder: Path, number: signal.Signals
) -> None:
    with System(tmp_path, *EMULATED, "--model", f"{tiny_folder}:1") as system:
        processes = system.descendants()
        assert len(processes) >= 4
        assert system.stop(number) == 0
        assert gone(processes) == []
    assert not (tmp_path / "run" / "up.json").exists()


def test_a_long_answer_does_not_hold_up_the_stop(
    tmp_path: Path, tiny_folder: Path, slow_profile: Path
) -> None:
    """The gateway gives a running answer most of the time to stop, then ends by itself."""
    (tmp_path / "collm.yaml").write_text("up: {stop_timeout: 20}\n")
    slower = tmp_path / "slower.yaml"  # 100 s for the answer
    slower.write_text(slow_profile.read_text().replace("0.02", "0.2"))
    options = (*EMULATED, "--profile", str(slower), "--model", f"{tiny_folder}:1")
    with System(tmp_path, *options) as system:
        client = system.client()
        stream = client.completions.create(
            model="tiny", prompt="on", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        parts = iter(stream)
        next(parts)
        assert system.stop() == 0
        with pytest.raises((openai.APIError, httpx.TransportError)):
            list(parts)
    assert "killed" not in system.log.read_text().replace("once more to kill", "")


def test_a_replica_may_drain_longer_than_others_may_stop(tmp_path: Path, tiny_folder: Path) -> None:
    """No process is gone within a hundredth of a second."""
    (tmp_path / "collm.yaml").write_text("up: {stop_timeout: 0.01}\n")
    with System(tmp_path, *EMULATED, "--model", f"{tiny_folder}:1") as system:
        assert system.stop() == 0
        log = system.log.read_text()
    assert "dispatcher did not stop within 0 s; killed" in log
    assert "replica-0 did not stop" not in log


def test_a_killed_runner_leaves_no_process(tmp_path: Path, tiny_model: Path) -> None:
    """With a real engine, so that children of children are among them."""
    options = ("--model", f"{tiny_model}:1", "--served-model-name", "tiny", "--no-train")
    with System(tmp_path, *options) as system:
        processes = system.descendants()
        system.process.kill()
        assert gone(processes) == []


def test_a_replica_killed_in_mid_answer_loses_nothing(
    tmp_path: Path, tiny_folder: Path, slow_profile: Path
) -> None:
    options = (*EMULATED, "--profile", str(slow_profile), "--model", f"{tiny_folder}:2")
    with System(tmp_path, *options) as system:
        client = system.client()
        streams = [
            client.completions.create(
                model="tiny",
                prompt=f"question {i}",
                max_tokens=100,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            for i in range(4)
        ]
        iterators = [iter(s) for s in streams]
        for iterator in iterators:
            next(iterator)
        victim = system.pids()["replica-0"]
        os.kill(victim, signal.SIGKILL)
        for iterator in iterators:
            last = list(iterator)[-1]
            assert last.usage.completion_tokens == 100
        _await(lambda: system.pids()["replica-0"] not in (None, victim), "no restart")
        assert "replica-0 died (signal SIGKILL)" in system.log.read_text()
        system.await_drained()


def test_a_redis_restart_is_waited_out(
    tmp_path: Path, tiny_folder: Path, slow_profile: Path
) -> None:
    options = (*EMULATED, "--profile", str(slow_profile), "--model", f"{tiny_folder}:1")
    with System(tmp_path, *options) as system:
        stream = iter(
            system.client().completions.create(
                model="tiny",
                prompt="before",
                max_tokens=100,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
        )
        next(stream)
        os.kill(system.pids()["redis"], signal.SIGKILL)
        assert list(stream)[-1].usage.completion_tokens == 100
        after = system.client().completions.create(model="tiny", prompt="after", max_tokens=3)
        assert after.usage.completion_tokens <= 3
        system.await_drained()


def test_a_second_start_on_the_same_data_answers(tmp_path: Path, tiny_folder: Path) -> None:
    for _ in range(2):
        with System(tmp_path, *EMULATED, "--model", f"{tiny_folder}:1") as system:
            answer = system.client().completions.create(model="tiny", prompt="a", max_tokens=2)
            assert answer.choices[0].finish_reason in ("stop", "length")
            assert [r["id"] for r in system.queues()["replicas"]] == ["replica-0"]


def test_an_adapter_given_at_the_start_is_served_under_its_name(
    tmp_path: Path, tiny_model: Path
) -> None:
    adapter = write_adapter(tiny_model, tmp_path / "law", seed=3)
    options = ("--model", f"{tiny_model}:1", "--served-model-name", "tiny", "--no-train")
    with System(tmp_path / "data", *options, "--lora-modules", f"law={adapter}") as system:
        client = system.client()
        assert sorted(m.id for m in client.models.list().data) == ["law", "tiny"]
        texts = [
            client.completions.create(model=m, prompt="abc", max_tokens=16, temperature=0)
            .choices[0]
            .text
            for m in ("tiny", "law")
        ]
        assert texts[0] != texts[1]
        assert system.queues()["replicas"][0]["adapters"]["law"]


def test_adapters_given_at_the_start_go_to_the_admin_port_where_one_is_set(
    tmp_path: Path, tiny_model: Path
) -> None:
    adapter = write_adapter(tiny_model, tmp_path / "law", seed=3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--model", f"{tiny_model}:1", "--served-model-name", "tiny", "--no-train")
    variables = {"COLLM_GATEWAY_ADMIN_PORT": str(port)}
    data = tmp_path / "data"
    with System(data, *options, "--lora-modules", f"law={adapter}", variables=variables) as system:
        assert system.facts["admin_url"] == f"http://127.0.0.1:{port}"
        assert sorted(m.id for m in system.client().models.list().data) == ["law", "tiny"]
        body = {"lora_name": "law"}
        for url, status in ((system.url, 404), (system.facts["admin_url"], 200)):
            reply = httpx.post(f"{url}/v1/unload_lora_adapter", json=body, timeout=60)
            assert reply.status_code == status, reply.text


def test_an_adapter_folder_that_is_none_is_told_before_anything_starts(
    tmp_path: Path, tiny_model: Path
) -> None:
    command = [sys.executable, "-m", "collm", "up", "--data-dir", str(tmp_path), "--port", "0"]
    command += ["--model", str(tiny_model), "--lora-modules", f"law={tmp_path}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "no adapter_config.json" in result.stderr
    assert not (tmp_path / "redis").exists()
