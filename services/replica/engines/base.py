"""The interface between a replica's serving loop and the engine that computes.

Two engines: ``torch`` (the real one) and ``emulated`` (computes nothing, takes its time from a
hardware profile). The loop calls every method from one task, and none while ``step`` is
outstanding; so an engine needs no lock, and Redis is never blocked by computing because the
torch engine runs its step in a thread.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from shared.messages import Finished, Generate, Output
from shared.records import ModelCard


class Rejected(ValueError):
    """The engine can never serve this request; the client is told why (HTTP status)."""

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class AdapterError(ValueError):
    """An adapter folder cannot be served: names the file and the tensor or field at fault."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step did. Seconds, tokens."""

    outputs: tuple[tuple[str, Output], ...] = ()  # (gateway, output)
    finished: tuple[Finished, ...] = ()
    seconds: float = 0.0
    b: int = 0  # requests that took part
    prefill_tokens: int = 0
    decode_tokens: int = 0


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A cheap look at the engine between steps."""

    running: int  # requests with KV memory
    waiting: int  # submitted, no KV memory yet
    kv_used: int  # tokens
    kv_total: int
    b_limit: int
    adapters: dict[str, str]  # name -> version given to new requests
    preemptions: int = 0  # sequences that gave their memory back so far


class Engine(Protocol):
    """Continuous batching over one base model and many adapters."""

    card: ModelCard
    b_max: int  # highest concurrency its memory carries

    def submit(self, request: Generate) -> None:
        """Queue a request for the next step. Raises Rejected if it can never be served."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Drop a request wherever it is; its memory is free at the next step.

        No Output is produced; the next report's ``finished`` names it with reason "cancelled".
        False: unknown.
        """
        ...

    async def step(self) -> StepReport:
        """One iteration over all running requests; returns at once when there is no work."""
        ...

    def has_work(self) -> bool: ...

    def configure(self, *, b: int) -> None:
        """Set the concurrency limit (1 to b_max); running requests are never dropped for it."""
        ...

    def load_adapter(self, name: str, version: str, path: str, *, current: bool = True) -> None:
        """Serve this PEFT folder as ``name`` from the next step on. Raises AdapterError.

        ``current=False`` makes a version ready for requests pinned to it and leaves the version
        that new requests get as it is. Loading a resident version again only makes it current.
        May be called in a thread; the loop calls nothing else meanwhile.
        """
        ...

    def has_adapter(self, name: str, version: str | None = None) -> bool:
        """Whether a request for ``name`` (pinned to ``version``, if given) can start at once.

        False for a version that was moved out: the loop loads it again from disk.
        """
        ...

    def unload_adapter(self, name: str) -> bool:
        """Refuse new requests for it; running ones finish. False: not loaded."""
        ...

    def use_threads(self, count: int) -> None:
        """Compute the next step with at most ``count`` threads; called before each step."""
        ...

    def status(self) -> EngineStatus: ...

    def close(self) -> None: ...
