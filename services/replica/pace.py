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
STRETCH = 4.0  # times as long as without prompts a step may be at any rate
LEAST_PREFILL = 16  # tokens a step that prompts get even when decodes fill the budget


def beside_decodes(
    base: float, token: float, step_seconds: float, limits_ms: Iterable[float]
) -> int:
    """Prompt tokens that a step takes beside decodes.

    ``base``: seconds of a step without prompts; ``token``: seconds a prompt token adds;
    ``step_seconds``: how long a step may become; ``limits_ms``: times per token that the decodes
    beside must keep. Where ``base`` alone nearly fills ``step_seconds``, prompts still get three
    quarters of a step: else a slow machine reads its weights once for every few prompt tokens,
    and under load its queue of prompts never ends.
    """
    longest = max(step_seconds, STRETCH * base)
    allowed = min([longest, *(SHARE * ms / 1e3 for ms in limits_ms)])
    return max(LEAST_PREFILL, int((allowed - base) / token))


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
        return beside_decodes(self._base, self._token, self._step_seconds, limits)
