"""Ready means: a real request for each model was answered through the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

Tell = Callable[[str], None]
POLL_SECONDS = 0.1


class NotReady(RuntimeError):
    """No answer in time; the message says what was seen last."""


async def answers(url: str, models: Sequence[str], timeout: float, tell: Tell) -> None:
    """Ask each model for one token until it answers. Raises NotReady after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
        for model in models:
            await _ask(client, model, end, tell)


async def _ask(client: httpx.AsyncClient, model: str, end: float, tell: Tell) -> None:
    request = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    seen = "nothing yet"
    while time.monotonic() < end:
        try:
            reply = await client.post("/v1/completions", json=request)
        except httpx.TransportError as e:
            now = f"the gateway is not reached ({type(e).__name__})"
        else:
            if reply.status_code == 200:
                return
            now = f"the gateway says {reply.status_code}: {_message(reply)}"
        if now != seen:
            tell(f"waiting for {model}: {now}")
            seen = now
        await asyncio.sleep(POLL_SECONDS)
    raise NotReady(f"{model} did not answer in time; seen last: {seen}")


def _message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]
