"""How many prompt tokens a step takes beside running answers. Pure: seconds in, tokens out.

Chunks cost next to no throughput from some 64 tokens on, while every running answer waits for
the whole step: so a step beside decodes is kept short (Sarathi-Serve's stall-free batching), by
what prompt tokens and a step without any have taken so far.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.slo import Slo

MEMORY = 0.8  # weight of earlier steps
SHARE = 0.5  # of a time-per-token limit that one step may take: the rest waits for others' steps


class StepPace:
    """Learns seconds a prompt token and seconds of a step without prompts; gives the budget."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._base = 0.0  # seconds of a step without prompt tokens
        self._token: float | None = None  # seconds a prompt token adds

    def learn(self, seconds: float, prompt_tokens: int) -> None:
        """A step took ``seconds`` with so many prompt tokens."""
        if not prompt_tokens:
            self._base = MEMORY * self._base + (1 - MEMORY) * seconds if self._base else seconds
            return
        # A step may be faster than the mean without prompts, yet no token is free.
        now = max(seconds - self._base, 0.1 * seconds) / prompt_tokens
        self._token = now if self._token is None else MEMORY * self._token + (1 - MEMORY) * now

    def budget(self, running: Iterable[Slo]) -> int | None:
        """Prompt tokens beside answers with these limits; None before anything was learnt."""
        if self._token is None:
            return None
        limits = [slo.tpot_ms for slo in running if slo.tpot_ms is not None]
        allowed = min([self._step_seconds, *(SHARE * ms / 1e3 for ms in limits)])
        return max(0, int((allowed - self._base) / self._token))
