"""The health check of the containers, against the pages that it asks."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

from prometheus_client import CollectorRegistry

from shared.status_server import StatusServer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "healthy.sh"


async def _ask(port: int, path: str) -> int:
    done = await asyncio.to_thread(
        subprocess.run, [SCRIPT, str(port), path], capture_output=True, timeout=30, check=False
    )
    return done.returncode


async def test_only_a_page_that_says_200_is_healthy() -> None:
    server = StatusServer(CollectorRegistry(), live=lambda: None, ready=lambda: "no model yet")
    port = await server.start("127.0.0.1", 0)
    try:
        assert await _ask(port, "/health/live") == 0
        assert await _ask(port, "/health/ready") == 1
        assert await _ask(port, "/nowhere") == 1
    finally:
        await server.stop()
    assert await _ask(port, "/health/live") == 1


def test_the_images_have_it_under_the_name_that_compose_uses() -> None:
    assert SCRIPT.stat().st_mode & 0o111
    base = (ROOT / "Dockerfile").read_text().split(" AS control")[0]
    found = re.search(r"COPY deploy/healthy.sh /usr/local/bin/(\S+)", base)
    assert found is not None
    compose = (ROOT / "docker-compose.yml").read_text()
    assert compose.count(f'["CMD", "{found[1]}", ') == 6
    assert "!deploy/healthy.sh" in (ROOT / ".dockerignore").read_text().splitlines()
