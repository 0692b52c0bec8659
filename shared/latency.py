"""Latency of a replica as linear functions of what it does, and the batch size that fills a SLO.

Source: CoLLM (arXiv 2604.16400), latency model and Ideal Serving Mode; the prefill line and the
closed form are this project's completion. Seconds, tokens, requests, samples throughout.
"""

from __future__ import annotations

import math

import msgspec


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of one replica.

    decode iteration  T_infer(b, B)   = alpha1 b + alpha2 B' + alpha3 b B' + alpha0
                      B' = B, but at most ``flat`` where that is above 0
    prefill           T_prefill(p, B) = pi1 p + pi2 B + pi0          p = prompt tokens
    micro-step        T_train(b, B)   = gamma1 B + gamma2 b + gamma0

    The paper's T_infer is that of alpha3 = flat = 0. On a GPU training takes a share of the
    machine that grows with B. On a CPU it takes cores, which every request of an iteration then
    misses (alpha3), and it takes them whole whatever its batch (flat).
    """

    alpha1: float = 0.0
    alpha2: float = 0.0
    alpha0: float = 0.0
    alpha3: float = 0.0
    flat: float = 0.0  # samples; a larger micro-batch slows decoding no further; 0: it does
    pi1: float = 0.0
    pi2: float = 0.0
    pi0: float = 0.0
    gamma1: float = 0.0
    gamma2: float = 0.0
    gamma0: float = 0.0

    def t_infer(self, b: float, B: float = 0.0) -> float:
        """Seconds of one decode iteration with b requests beside a micro-batch B."""
        return self.infer_slope(B) * b + self.infer_fixed(B)

    def infer_slope(self, B: float) -> float:
        """Seconds of an iteration that one more request adds beside a micro-batch B."""
        return self.alpha1 + self.alpha3 * self._felt(B)

    def infer_fixed(self, B: float) -> float:
        """Seconds of an iteration whatever its batch."""
        return self.alpha0 + self.alpha2 * self._felt(B)

    def _felt(self, B: float) -> float:
        return min(B, self.flat) if self.flat > 0 else B

    def t_prefill(self, tokens: float, B: float = 0.0) -> float:
        """Seconds to prefill ``tokens`` prompt tokens."""
        return self.pi1 * tokens + self.pi2 * B + self.pi0

    def t_train(self, b: float, B: float) -> float:
        """Seconds of one training micro-step, waits of yielding excluded."""
        return self.gamma1 * B + self.gamma2 * b + self.gamma0

    def service(self, b: float, B: float, prompt: float, output: float) -> float:
        """S(b, B): seconds in the replica of a request of ``prompt`` and ``output`` tokens.

        While it lives about b prompts are prefilled beside it, so the prefill term is that of
        b prompts.
        """
        return self.t_prefill(b * prompt, B) + output * self.t_infer(b, B)

    def rate(self, b: float, B: float, prompt: float, output: float) -> float:
        """Requests per second of a replica that holds b requests at all times."""
        seconds = self.service(b, B, prompt, output)
        return math.inf if seconds <= 0 else b / seconds

    def b_star(
        self,
        budget: float,
        B: float,
        prompt: float,
        output: float,
        *,
        b_max: int,
        slo: float | None = None,
        tpot: float | None = None,
    ) -> int:
        """Largest b with S(b, B) <= budget and, if given, T_infer(b, B) <= tpot; 0 to b_max.

        ``budget`` is the processing budget (tau'), ``slo`` the whole limit (tau): the result is
        never below 1 while a lone request without training keeps ``slo``.
        """
        fixed = self.t_prefill(0, B) + output * self.t_infer(0, B)
        slope = self.pi1 * prompt + output * self.infer_slope(B)
        b = _largest(budget - fixed, slope, b_max)
        if tpot is not None:
            b = min(b, _largest(tpot - self.t_infer(0, B), self.infer_slope(B), b_max))
        if b < 1:
            limit = budget if slo is None else slo
            return 1 if self.service(1, 0, prompt, output) <= limit else 0
        return b


def _largest(room: float, slope: float, b_max: int) -> int:
    """Largest integer b <= b_max with slope * b <= room (a hair of slack for rounding)."""
    if room < 0:
        return 0
    if slope <= 0 or room >= slope * b_max:
        return b_max
    return min(b_max, int(room / slope * (1 + 1e-12) + 1e-9))
