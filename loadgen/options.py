"""What one run was asked to do; saved beside its results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from shared.slo import Slo

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class OptionError(ValueError):
    """The command line makes no sense; the message says what to change."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, tokens; scales multiply."""

    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = CHAT
    stream: bool = True
    api_key: str | None = None
    headers: dict[str, str] = {}
    model: str | None = None  # None: the first that the server lists
    timeout: float = 600.0

    traces: tuple[tuple[str, Path], ...] = ()  # (tag, file)
    trace_align: str = "clock"
    request_rate: float | None = None  # None with a trace
    burstiness: float = 1.0
    rate_scale: float = 1.0
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    max_prompt: int | None = None
    max_output: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    limit: int | None = None
    duration: float | None = None
    seed: int = 0
    max_concurrency: int | None = None
    num_warmups: int = 0

    prompts: tuple[Path, ...] = ()
    split: str = "inference"
    tokenizer: Path | None = None
    lora_modules: tuple[str, ...] = ()
    lora_assignment: str = "random"
    zipf_exponent: float = 1.0

    ignore_eos: bool = False
    temperature: float | None = None
    extra_body: dict[str, Any] = {}
    slos: dict[str, Slo] = {}
    slo_headers: bool = False

    save_result: bool = False
    save_detailed: bool = False
    result_dir: Path = Path()
    result_filename: str | None = None
    label: str | None = None
    metadata: dict[str, str] = {}
    progress: bool = True

    def check(self) -> None:
        """Raises OptionError."""
        if bool(self.traces) == (self.request_rate is not None):
            raise OptionError("give either --trace FILE (repeatable) or --request-rate RATE")
        if self.request_rate is not None and not self.request_rate > 0:
            raise OptionError("--request-rate must be above 0 (inf: all at once)")
        if not self.traces and self.limit is None and self.duration is None:
            raise OptionError("--request-rate never ends: give --limit N or --duration SECONDS")
        if self.request_rate is not None and math.isinf(self.request_rate) and self.limit is None:
            raise OptionError("--request-rate inf needs --limit N")
        positive = ("burstiness", "rate_scale", "prompt_scale", "output_scale", "timeout")
        for name in (*positive, "limit", "duration", "max_concurrency", "max_prompt", "max_output"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"--{name.replace('_', '-')} must be above 0, not {value}")
        if self.endpoint not in (CHAT, COMPLETIONS):
            raise OptionError(f"--endpoint {self.endpoint}: {CHAT} or {COMPLETIONS}")

    def saved(self) -> dict[str, Any]:
        """For the result file: everything but the key and the headers (which may hold one)."""
        plain: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        for secret in ("api_key", "headers"):
            plain.pop(secret)
        return plain
