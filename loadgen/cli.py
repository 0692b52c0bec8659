"""Command line of the load generator: ``python -m loadgen …`` and ``collm replay …``."""

from __future__ import annotations

import argparse
import asyncio
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console

from loadgen import arrivals, prompts, report, trace
from loadgen.arrivals import Planned
from loadgen.client import Client, HttpError
from loadgen.driver import Driver, served
from loadgen.options import CHAT, OptionError, Options
from shared import slo
from shared.settings import client_key

UNSENT = (
    "the limits of --goodput only judge the answers; without --slo-headers the server is not told "
    "of them and serves each request by the limits of its own, or by none"
)
BAD_INPUT = (trace.TraceError, prompts.PromptError, OptionError, HttpError, ValueError)


def parser(prog: str = "python -m loadgen") -> argparse.ArgumentParser:
    """Names as in ``vllm bench serve`` where it has them."""
    p = argparse.ArgumentParser(
        prog=prog,
        description="Replay traces or random arrivals against an OpenAI-compatible server. "
        "Prints a table on stderr and one JSON line on stdout.",
    )
    _server(p.add_argument_group("server"))
    _schedule(p.add_argument_group("schedule"))
    _requests(p.add_argument_group("requests"))
    _results(p.add_argument_group("results"))
    return p


def _server(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--base-url", default="http://127.0.0.1:8000")
    g.add_argument("--endpoint", default=CHAT)
    g.add_argument("--no-stream", dest="stream", action="store_false")
    g.add_argument("--api-key", help="default: COLLM_API_KEY or OPENAI_API_KEY")
    g.add_argument("--header", action="append", default=[], metavar="NAME=VALUE")
    g.add_argument("--model", help="default: the first model the server lists")
    g.add_argument("--timeout", type=float, default=600.0, help="seconds for a whole answer")


def _schedule(g: argparse._ArgumentGroup) -> None:
    g.add_argument(
        "--trace",
        action="append",
        default=[],
        metavar="[TAG=]CSV",
        help="Azure LLM inference trace; repeat to merge several",
    )
    g.add_argument("--trace-align", choices=("clock", "start"), default="clock")
    g.add_argument("--request-rate", type=float, help="requests/s instead of a trace; inf: at once")
    g.add_argument("--burstiness", type=float, default=1.0, help="gamma shape; 1: Poisson")
    g.add_argument("--rate-scale", type=float, default=1.0, help="compress the trace's time")
    g.add_argument("--limit", "--num-prompts", type=int)
    g.add_argument("--duration", type=float, help="seconds of arrivals")
    g.add_argument("--seed", type=int, default=0)
    g.add_argument("--max-concurrency", type=int)
    g.add_argument("--num-warmups", type=int, default=0)


def _requests(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--prompts", action="append", default=[], type=Path, metavar="JSONL")
    g.add_argument(
        "--split",
        choices=("inference", "all"),
        default="inference",
        help="which samples are asked: the 30%% kept from training, or all",
    )
    g.add_argument("--tokenizer", type=Path, help="tokenizer.json or its folder, for exact lengths")
    for name in ("prompt", "output"):
        g.add_argument(f"--{name}-scale", type=float, default=1.0)
        g.add_argument(f"--max-{name}", type=int, metavar="TOKENS")
        g.add_argument(f"--{name}-tokens", type=int, help="length without a trace")
    g.add_argument("--ignore-eos", action="store_true", help="force the output lengths")
    g.add_argument("--temperature", type=float)
    g.add_argument("--lora-modules", nargs="+", default=[], metavar="NAME")
    g.add_argument("--lora-assignment", choices=("random", "round-robin", "zipf"), default="random")
    g.add_argument("--zipf-exponent", type=float, default=1.0)
    g.add_argument("--extra-body", default="{}", metavar="JSON")
    g.add_argument(
        "--goodput",
        "--slo",
        nargs="+",
        action="extend",
        default=[],
        metavar="[TAG/]NAME:MS",
        help="limits: ttft:200 tpot:50 e2el:2000 (or e2e:2s)",
    )
    g.add_argument("--slo-headers", action="store_true", help="send the limits with each request")


def _results(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--save-result", action="store_true")
    g.add_argument(
        "--save-detailed", action="store_true", help="every request, text and reference too"
    )
    g.add_argument("--result-dir", type=Path, default=Path())
    g.add_argument("--result-filename")
    g.add_argument("--label")
    g.add_argument("--metadata", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    g.add_argument("--no-progress", "--disable-tqdm", dest="progress", action="store_false")


def options(arguments: argparse.Namespace) -> Options:
    """Checked options. Raises OptionError or ValueError."""
    values = dict(vars(arguments))
    values["traces"] = tuple(trace.parse_argument(t) for t in values.pop("trace"))
    values["headers"] = _pairs("--header", values.pop("header"))
    values["metadata"] = _pairs("--metadata", values["metadata"])
    values["slos"] = slo.parse(values.pop("goodput"))
    values["api_key"] = values["api_key"] or client_key()
    try:
        values["extra_body"] = orjson.loads(values["extra_body"])
    except orjson.JSONDecodeError as e:
        raise OptionError(f"--extra-body: not JSON: {e}") from e
    if not isinstance(values["extra_body"], dict):
        raise OptionError("--extra-body: a JSON object expected")
    for name in ("prompts", "lora_modules"):
        values[name] = tuple(values[name])
    values["save_result"] |= values["save_detailed"]
    chosen = Options(**values)
    chosen.check()
    return chosen


def _pairs(option: str, items: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for item in items:
        name, found, value = item.partition("=")
        if not found or not name:
            raise OptionError(f"{option} {item!r}: NAME=VALUE expected")
        pairs[name] = value
    return pairs


def schedule(o: Options) -> Iterator[Planned]:
    """The run's arrivals, lazily."""
    if o.traces:
        rows = trace.merge([trace.read(path, tag) for tag, path in o.traces], align=o.trace_align)
        planned = arrivals.from_trace(
            rows,
            rate_scale=o.rate_scale,
            prompt_scale=o.prompt_scale,
            output_scale=o.output_scale,
            max_prompt=o.max_prompt,
            max_output=o.max_output,
        )
    else:
        assert o.request_rate is not None
        planned = arrivals.gamma(
            o.request_rate * o.rate_scale,
            o.burstiness,
            o.seed,
            prompt_tokens=o.prompt_tokens,
            output_tokens=o.output_tokens,
        )
    return arrivals.limited(planned, limit=o.limit, duration=o.duration)


def make_prompts(o: Options) -> prompts.Prompts:
    """The run's prompts; raises PromptError."""
    lengths: prompts.Lengths = (
        prompts.ByTokenizer(o.tokenizer, templated=o.endpoint == CHAT)
        if o.tokenizer
        else prompts.ByCharacters()
    )
    samples = prompts.load(o.prompts, split=o.split) if o.prompts else prompts.synthetic()
    return prompts.Prompts(samples, lengths, o.seed)


async def replay(o: Options, console: Console) -> dict[str, Any]:
    """One whole run; returns its result (with details if asked). Raises HttpError."""
    headers = {"authorization": f"Bearer {o.api_key}"} if o.api_key else {}
    client = Client(o.base_url, headers={**headers, **o.headers})
    source, planned = make_prompts(o), schedule(o)
    cards = await served(client)
    if o.model is None and not cards:
        raise HttpError("the server lists no model; name one with --model")
    model = o.model or str(cards[0]["id"])
    driver = Driver(o, client, source, planned, model)
    await driver.warm_up(o.num_warmups)
    duration = await _driven(driver, o, console)
    client.close()
    emulated = any(card.get("emulated") or card.get("engine") == "emulated" for card in cards)
    result = report.build(
        o,
        driver.outcomes,
        duration=duration,
        span=driver.span,
        model=model,
        emulated=emulated,
        exact_lengths=source.lengths.exact,
        interrupted=driver.interrupted,
    )
    if o.save_detailed:
        result |= report.details(driver.outcomes, o.slos, driver.samples)
    return result


async def _driven(driver: Driver, o: Options, console: Console) -> float:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, driver.stop)
    bar = asyncio.create_task(report.show_progress(driver.counters, o.limit, console))
    if not o.progress or not console.is_terminal:
        bar.cancel()
    try:
        return await driver.run()
    finally:
        bar.cancel()
        await asyncio.gather(bar, return_exceptions=True)
        loop.remove_signal_handler(signal.SIGINT)


def main(arguments: Sequence[str] | None = None, prog: str = "python -m loadgen") -> int:
    """0: something was answered; 1: nothing was; 2: bad input; 130: interrupted."""
    console = Console(stderr=True)
    try:
        chosen = options(parser(prog).parse_args(arguments))
        if chosen.slos and not chosen.slo_headers:
            print(f"{prog}: note: {UNSENT}", file=sys.stderr)
        _raise_file_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(replay(chosen, console))
    except BAD_INPUT as e:
        print(f"{prog}: {e}", file=sys.stderr)
        return 2
    report.table(result, console)
    if chosen.save_result:
        console.print(f"saved: {report.save(result, chosen)}", highlight=False)
    print(report.one_line(result), flush=True)
    if result["interrupted"]:
        return 130
    return 0 if result["completed"] else 1


def _raise_file_limit() -> None:
    """A connection a running request: take all the descriptors the system grants."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
