"""The page in a real Chromium, of a real process, over a real Redis."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from collm.redis_server import RedisServer, free_port
from tests.dashboard import scene

CHROMIUM = Path("/usr/bin/chromium")
ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 60_000  # ms; a busy machine starts a browser slowly

# Looked for, not imported: both take seconds, and only the page's own process needs the first.
pytestmark = pytest.mark.skipif(
    find_spec("nicegui") is None, reason="the extra `dashboard` is not installed"
)


@pytest.fixture
async def browser() -> AsyncIterator[object]:
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}; on Debian: apt-get install chromium")
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    async with api.async_playwright() as p:
        chromium = await p.chromium.launch(executable_path=str(CHROMIUM), args=ARGS)
        yield chromium
        await chromium.close()


class Dashboard:
    """A `collm dashboard` of its own."""

    def __init__(self, redis_url: str, folder: Path, *options: str) -> None:
        self.url, self._arguments = "", ("--redis", redis_url, "--data-dir", str(folder), *options)
        self._folder = folder

    async def __aenter__(self) -> Dashboard:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "collm", "dashboard", "--port", "0", *self._arguments),
            cwd=self._folder,
            stderr=asyncio.subprocess.PIPE,
        )
        assert self._process.stderr is not None
        async with asyncio.timeout(60):
            while line := (await self._process.stderr.readline()).decode():
                if found := re.search(r"dashboard on (\S+)", line):
                    self.url = found[1]
                    break
        assert self.url, "the dashboard ended before it listened"
        self._rest = asyncio.create_task(self._process.stderr.read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            self.code = await self._process.wait()
        self.log = (await self._rest).decode()

    async def status(self, path: str) -> int:
        """HTTP status; 0 while it does not listen."""
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            try:
                return (await client.get(self.url + path)).status_code
            except httpx.HTTPError:
                return 0

    async def until(self, path: str, status: int) -> None:
        async with asyncio.timeout(60):
            while await self.status(path) != status:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)


async def whole_scene(redis: Redis, folder: Path) -> None:
    await scene.replicas(redis)
    await scene.adapters(redis, folder)
    await scene.rounds(redis)
    await scene.steps(redis)


async def open_page(browser: object, url: str, **options: object) -> tuple[object, list[str]]:
    """A page whose first charts are drawn, and the errors that its console tells."""
    context = await browser.new_context(**options)  # type: ignore[attr-defined]
    page = await context.new_page()
    page.set_default_timeout(PATIENCE)
    errors: list[str] = []
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    await page.goto(url, wait_until="commit")
    await page.wait_for_selector("canvas")
    return page, errors


async def test_the_page_shows_the_cluster_and_follows_it(
    redis: Redis, redis_server: RedisServer, tmp_path: Path, browser: object
) -> None:
    await whole_scene(redis, tmp_path)
    async with Dashboard(redis_server.url, tmp_path) as dashboard:
        await dashboard.until("/health/ready", 200)
        page, errors = await open_page(browser, dashboard.url)
        await page.wait_for_selector("text=replica-4")
        assert await page.locator(".lane").count() == 5
        assert await page.locator(".lane:has(.bar i)").count() == 5
        text = await page.inner_text("body")
        for word in ("EMULATED", "support", "legal-de", "round 4", "No gateway is known"):
            assert word in text
        assert await page.locator(".chip.kept").count() == 1
        await scene.event(redis, "lost", replica="replica-9", requests=3)
        await page.wait_for_selector("text=replica-9")
        await page.fill("input[aria-label=contains]", "replica-9")
        await page.wait_for_function("document.querySelectorAll('.event').length == 1")
        assert errors == []
        assert await dashboard.status("/metrics") == 200
    assert "Traceback" not in dashboard.log


async def test_nothing_is_wider_than_a_phone_in_either_theme(
    redis: Redis, redis_server: RedisServer, tmp_path: Path, browser: object
) -> None:
    await whole_scene(redis, tmp_path)
    grounds = set()
    async with Dashboard(redis_server.url, tmp_path) as dashboard:
        await dashboard.until("/health/ready", 200)
        for scheme in ("light", "dark"):
            size = {"width": 390, "height": 844}
            page, errors = await open_page(
                browser, dashboard.url, viewport=size, color_scheme=scheme
            )
            await page.wait_for_selector("text=replica-4")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390
            grounds.add(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert errors == []
    assert len(grounds) == 2


async def test_an_empty_cluster_and_an_absent_redis_are_said(
    tmp_path: Path, browser: object
) -> None:
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis", port=free_port(), append_only=False)
    server.start()
    try:
        async with Dashboard(server.url, tmp_path) as dashboard:
            await dashboard.until("/health/ready", 200)
            page, _ = await open_page(browser, dashboard.url)
            for text in ("No replica has registered", "No adapter", "No session", "No event"):
                await page.wait_for_selector(f"text={text}")
            assert not await page.is_visible(".emulated")
            server.stop()
            await page.wait_for_selector("text=Redis gives no answer")
            await dashboard.until("/health/ready", 503)
            assert await dashboard.status("/health/live") == 200
            server.start()
            await page.wait_for_selector("text=Redis gives no answer", state="hidden")
            await dashboard.until("/health/ready", 200)
        assert dashboard.code == 0
    finally:
        server.stop()
