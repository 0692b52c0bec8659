"""Several emulated replicas in one process: each with its own streams, record and life."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from collm.redis_server import RedisServer
from shared import names
from shared.messages import Drain
from tests.replica.harness import ROOT, Cluster, Process, generate, profile, running, until

IDS = tuple(f"replica-{i}" for i in range(16))


async def status_port(process: Process) -> int:
    async def found() -> int | None:
        for line in process.log.read_text().splitlines():
            if "metrics and health on" in line:
                return int(line.rsplit(":", 1)[1])
        return None

    port: int = await until(found, "status server")
    return port


async def test_sixteen_replicas_answer_each_on_its_own_streams(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    cluster = Cluster(redis)
    path = profile(tmp_path, 0.02)
    with running(redis_server.url, tmp_path, profile=path, ids=json.dumps(IDS)) as process:
        lives = {(await cluster.serving(replica)).incarnation for replica in IDS}
        assert len(lives) == 16
        for replica in IDS:
            await cluster.release(generate(f"q-{replica}", tokens=5), replica=replica)
        for replica in IDS:
            await cluster.finish(f"q-{replica}")
            await cluster.drained(replica)
        (child,) = process.children().values()
        assert "torch" not in {Path(m.path).name.split(".")[0] for m in child.memory_maps()}
        assert child.memory_full_info().pss < 100e6
        assert psutil.Process(process.popen.pid).memory_full_info().pss < 100e6


async def test_metrics_and_health_tell_of_every_replica(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    cluster = Cluster(redis)
    path = profile(tmp_path, 0.02)
    ids = json.dumps(IDS[:2])
    with running(redis_server.url, tmp_path, profile=path, ids=ids) as process:
        port = await status_port(process)
        for replica in IDS[:2]:
            await cluster.serving(replica)
        await cluster.release(generate("a", tokens=5), replica=IDS[0])
        await cluster.finish("a")

        async def samples() -> dict[tuple[str, str | None], float]:
            text = await _get(f"http://127.0.0.1:{port}/metrics")
            return {
                (s.name, s.labels.get("engine")): s.value
                for family in text_string_to_metric_families(text)
                for s in family.samples
            }

        async def counted() -> bool:
            found = await samples()
            idle = found.get(("collm_num_requests_running", IDS[1])) == 0
            return idle and found.get(("collm_generation_tokens_total", IDS[0])) == 5

        await until(counted, "five tokens counted")
        for more in range(1, 6):
            await cluster.release(generate(f"more-{more}", tokens=5), replica=IDS[0])
            await cluster.finish(f"more-{more}")
            found = await samples()
            assert found["collm_generation_tokens_total", IDS[0]] == 5 + 5 * more, "as of now"
        assert json.loads(await _get(f"http://127.0.0.1:{port}/health/live")) == {"status": "ok"}
        assert json.loads(await _get(f"http://127.0.0.1:{port}/health/ready")) == {"status": "ok"}


async def _get(url: str) -> str:
    def read() -> str:
        with urllib.request.urlopen(url, timeout=5) as answer:
            text: str = answer.read().decode()
            return text

    return await asyncio.to_thread(read)


async def test_one_of_several_drains_and_the_others_go_on(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    cluster = Cluster(redis)
    path = profile(tmp_path, 0.02)
    with running(redis_server.url, tmp_path, profile=path, ids=json.dumps(IDS[:2])) as process:
        for replica in IDS[:2]:
            await cluster.serving(replica)
        await cluster.release(generate("a", tokens=40), replica=IDS[0])
        await cluster.command(Drain(reason="test"), replica=IDS[0])
        assert (await cluster.finish("a")).finish == "length"

        async def stopped() -> bool:
            return (await cluster.record(IDS[0])).state == "stopped"

        await until(stopped, "one has stopped")
        await cluster.release(generate("b"), replica=IDS[1])
        await cluster.finish("b")
        assert process.popen.poll() is None


async def test_collm_drain_waits_until_the_replica_has_stopped(
    redis_server: RedisServer, redis: Redis, tmp_path: Path
) -> None:
    cluster = Cluster(redis)
    with running(redis_server.url, tmp_path, profile=profile(tmp_path, 0.02)) as process:
        await cluster.serving()
        done = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "collm", "drain", "replica-0", "--redis", redis_server.url),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told, _ = await done.communicate()
        assert done.returncode == 0, told.decode()
        assert (await cluster.record()).state == "stopped"
        assert process.popen.wait(10) == 0
        assert await redis.get(names.replica_alive("replica-0")) is None


def test_the_emulated_engine_and_the_parent_import_no_torch() -> None:
    code = (
        "import sys, services.replica.__main__, services.replica.inference\n"
        "import services.replica.engines.emulated\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
