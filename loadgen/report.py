"""Result of a run: one JSON object, a table for people, files, a progress bar."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadgen import metrics
from loadgen.driver import Counters
from loadgen.metrics import Outcome
from loadgen.options import Options
from loadgen.prompts import Sample


def build(
    options: Options,
    outcomes: Sequence[Outcome],
    *,
    duration: float,
    span: float,
    model: str,
    emulated: bool,
    exact_lengths: bool,
    interrupted: bool = False,
) -> dict[str, Any]:
    """The whole result without details; every value is plain JSON."""
    slos = options.slos
    seconds = metrics.by_second(outcomes, slos)
    tags = sorted({o.tag for o in outcomes})
    rate = options.request_rate
    result: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if "chat" in options.endpoint else "openai",
        "label": options.label,
        "model_id": model,
        "tokenizer_id": str(options.tokenizer) if options.tokenizer else None,
        "num_prompts": len(outcomes),
        **options.metadata,
        "request_rate": rate if rate is not None else len(outcomes) / max(span, 1e-9),
        "burstiness": options.burstiness if rate is not None else None,
        "max_concurrency": options.max_concurrency,
        "emulated": emulated,
        "prompt_lengths": "exact" if exact_lengths else "approximate: 4 characters a token",
        "tokens_counted_by": _counted(outcomes),
        "interrupted": interrupted,
    }
    result |= metrics.summarise(outcomes, duration, slos)
    result["max_output_tokens_per_s"] = max(seconds["output_tokens"], default=0.0)
    result["max_concurrent_requests"] = metrics.peak_concurrency(outcomes)
    result |= metrics.client_health(outcomes, span)
    result["tags"] = {
        tag: metrics.summarise([o for o in outcomes if o.tag == tag], duration, slos)
        for tag in tags
        if len(tags) > 1
    }
    result["errors_by_kind"] = _errors(outcomes)
    result["by_second"] = seconds
    result["config"] = options.saved()
    result["client"] = {"python": platform.python_version(), "machine": platform.platform()}
    return result


def _counted(outcomes: Sequence[Outcome]) -> str:
    """ "usage", "chunks", "mixed" or "nothing"."""
    kinds = {o.counted_by for o in outcomes if o.ok}
    return kinds.pop() if len(kinds) == 1 else ("mixed" if kinds else "nothing")


def _errors(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How often each error came, the most frequent first (twenty at most)."""
    found: dict[str, int] = {}
    for o in outcomes:
        if o.error is not None:
            found[o.error[:160]] = found.get(o.error[:160], 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1])[:20])


def details(
    outcomes: Sequence[Outcome], slos: metrics.Slos, samples: Mapping[str, Sample]
) -> dict[str, Any]:
    """Arrays of ``vllm bench serve --save-detailed``, then every request and the references."""
    return {
        "input_lens": [o.input_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "start_times": [o.sent for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.gaps for o in outcomes],
        "latencies": [o.e2e for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error or "" for o in outcomes],
        "requests": [
            {
                "index": o.index,
                "tag": o.tag,
                "model": o.model,
                "sample": o.sample or None,
                "due": o.due,
                "lag": o.ready - o.due,
                "sent": o.sent,
                "ttft": o.ttft,
                "e2e": o.e2e,
                "asked_prompt": o.asked_prompt,
                "asked_output": o.asked_output,
                "input_tokens": o.input_tokens,
                "output_tokens": o.output_tokens,
                "status": o.status,
                "error": o.error,
                "shed": o.refused,
                "finish_reason": o.finish_reason,
                "good": o.met(metrics.slo_of(slos, o.tag)),
                "headers": o.headers,
            }
            for o in outcomes
        ],
        "references": {
            key: {"messages": s.messages, "reference": s.reference, "source": s.source}
            for key, s in samples.items()
            if key and s.reference
        },
    }


def save(result: Mapping[str, Any], options: Options) -> Path:
    """Write the result into ``--result-dir``; returns the file."""
    options.result_dir.mkdir(parents=True, exist_ok=True)
    name = options.result_filename or "{}-{}qps-{}-{}.json".format(
        options.label or result["backend"],
        round(result["request_rate"], 2),
        str(result["model_id"]).replace("/", "_"),
        result["date"],
    )
    path = options.result_dir / name
    path.write_bytes(orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY))
    return path


def one_line(result: Mapping[str, Any]) -> str:
    """The result for a terminal or a pipe: without by-second arrays, config and details."""
    long = (
        "by_second",
        "config",
        "client",
        "requests",
        "references",
        "input_lens",
        "output_lens",
        "start_times",
        "ttfts",
        "itls",
        "latencies",
        "generated_texts",
        "errors",
    )
    return orjson.dumps({k: v for k, v in result.items() if k not in long}).decode()


ROWS = (
    ("offered / completed / failed / shed", ("offered", "completed", "failed", "shed")),
    ("duration (s)", ("duration",)),
    ("input / output tokens", ("total_input_tokens", "total_output_tokens")),
    ("requests/s, good requests/s", ("request_throughput", "request_goodput")),
    ("output tokens/s, goodput tokens/s", ("output_throughput", "goodput_tokens_per_s")),
    ("SLO attainment", ("slo_attainment",)),
    ("TTFT mean / p50 / p99 (ms)", ("mean_ttft_ms", "p50_ttft_ms", "p99_ttft_ms")),
    ("TPOT mean / p50 / p99 (ms)", ("mean_tpot_ms", "p50_tpot_ms", "p99_tpot_ms")),
    ("ITL mean / p50 / p99 (ms)", ("mean_itl_ms", "p50_itl_ms", "p99_itl_ms")),
    ("E2EL mean / p50 / p99 (ms)", ("mean_e2el_ms", "p50_e2el_ms", "p99_e2el_ms")),
    ("client lag p50 / p99 (ms)", ("client_lag_p50_ms", "client_lag_p99_ms")),
)


def table(result: Mapping[str, Any], console: Console) -> None:
    """The numbers for people, one column more for each tag, and what to be wary of."""
    tags: Mapping[str, Mapping[str, Any]] = result["tags"]
    title = "Serving benchmark result" + (" (emulated engine)" if result["emulated"] else "")
    shown = Table("", "all", *tags, title=title)
    for name, keys in ROWS:
        cells = [_cell(part, keys) for part in (result, *tags.values())]
        shown.add_row(name, *cells)
    console.print(shown)
    for error, count in result["errors_by_kind"].items():
        console.print(f"{count} x {error}", style="red", markup=False, highlight=False)
    if result["client_behind"]:
        console.print(
            f"The client fell behind its schedule (lag p99 {result['client_lag_p99_ms']} ms): "
            "these latencies are not the server's alone. Lower the rate or free a core.",
            style="bold yellow",
        )


def _cell(part: Mapping[str, Any], keys: Sequence[str]) -> str:
    values = (part.get(key) for key in keys)
    return " / ".join("-" if v is None else f"{v:.6g}" for v in values)


async def show_progress(counters: Counters, total: int | None, console: Console) -> None:
    """A live bar until cancelled."""
    columns = (
        SpinnerColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=total)
        last_tokens, last = 0, time.monotonic()
        while True:
            await asyncio.sleep(0.5)
            now, c = time.monotonic(), counters
            rate = (c.tokens - last_tokens) / (now - last)
            last_tokens, last = c.tokens, now
            ended = c.completed + c.failed + c.shed
            progress.update(
                task,
                completed=ended,
                description=f"{c.sent} sent, {c.running} running, {c.completed} done, "
                f"{c.failed} failed, {c.shed} shed, {rate:.0f} tok/s",
            )
            progress.refresh()
