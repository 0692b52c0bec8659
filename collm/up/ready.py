"""Ready means: a real request for each model was answered through the gateway.

Where the gateway wants a key and COLLM_API_KEY holds none that it knows, a replica that serves,
as the open route /health shows it, has to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from collm.where import api_key
from shared.replica_state import ANSWERING

Tell = Callable[[str], None]
POLL_SECONDS = 0.1
TELL_SECONDS = 10.0  # what has not changed is told again after so long


class NotReady(RuntimeError):
    """No answer in time; the message says what was seen last."""


async def answers(url: str, models: Sequence[str], timeout: float, tell: Tell) -> None:
    """Ask each model for one token until it answers. Raises NotReady after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    headers = {"authorization": f"Bearer {api_key()}"}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=30.0, trust_env=False
    ) as client:
        for model in models:
            await _ask(client, model, end, tell)


async def _ask(client: httpx.AsyncClient, model: str, end: float, tell: Tell) -> None:
    request = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    seen, begun = "nothing yet", time.monotonic()
    told = begun
    while time.monotonic() < end:
        try:
            reply = await client.post("/v1/completions", json=request)
        except httpx.TransportError as e:
            now = f"the gateway is not reached ({type(e).__name__})"
        else:
            if reply.status_code == 200 or (
                reply.status_code == 401 and await _serves(client, model)
            ):
                return
            now = f"the gateway says {reply.status_code}: {_message(reply)}"
        if now != seen:
            tell(f"waiting for {model}: {now}")
            seen, told = now, time.monotonic()
        elif time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            tell(f"waiting for {model} for {told - begun:.0f} s: {now}")
        await asyncio.sleep(POLL_SECONDS)
    raise NotReady(f"{model} did not answer in time; seen last: {seen}")


async def _serves(client: httpx.AsyncClient, model: str) -> bool:
    """Whether /health names a replica of the model that takes requests."""
    try:
        states = (await client.get("/health")).json()["models"][model]["replicas"].values()
    except (httpx.TransportError, ValueError, KeyError):
        return False
    return not ANSWERING.isdisjoint(states)


def _message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]
