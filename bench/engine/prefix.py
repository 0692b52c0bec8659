"""What keeping the KV of equal beginnings saves: chats under one system prompt that grow."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.engine import jobs, material
from services.replica.engines.torch import TorchEngine
from shared import chat

TURNS = 4
SYSTEM = (
    "You are the assistant of a shop that sells parts for bicycles. Answer in a few plain "
    "sentences. Never promise a date of delivery; say that orders placed before noon leave the "
    "same day. Prices include taxes. A part that does not fit can be sent back within thirty days "
    "in its package, and the money is returned to the account it came from. If a customer asks "
    "for a repair, name the workshop in the main street and its hours, nine to five on weekdays. "
    "If you do not know whether a part fits, ask for the frame's size, its year and the maker. "
    "Be polite to those who complain, say what can be done for them, and do not argue. "
)


def compare(
    folder: Path, settings: dict[str, Any], *, chats: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Median seconds to the first token and prompt tokens computed, with reuse and without.

    Every round is a new system prompt, so that nothing is known at its start; in each of its
    turns all chats ask at once and the answers become part of the next turn's prompt.
    """
    engines = {
        name: TorchEngine.load(
            folder,
            name="model",
            dtype=settings["dtype"],
            threads=settings["threads"],
            kv_tokens=16384,
            weights=settings["weights"],
            prefix_cache=name == "reused",
        )
        for name in ("reused", "computed")
    }
    found: dict[str, dict[str, Any]] = {
        name: {"first": [[] for _ in range(TURNS)], "seconds": [], "prefill": []}
        for name in engines
    }
    for number in range(rounds):
        for name, engine in engines.items():
            engine.configure(b=chats)
            _round(engine, folder, number, chats, tokens, found[name])
    for engine in engines.values():
        engine.close()
    return {
        name: {
            "ttft_ms": [round(1e3 * statistics.median(turn), 1) for turn in f["first"]],
            "prefill_tokens": statistics.median(f["prefill"]),
            "seconds": round(statistics.median(f["seconds"]), 3),
        }
        for name, f in found.items()
    }


def _round(
    engine: TorchEngine, folder: Path, number: int, chats: int, tokens: int, found: dict[str, Any]
) -> None:
    tokenizer = chat.load(folder)
    questions = material.questions(chats * TURNS)
    system = {"role": "system", "content": f"Shop number {number}. {SYSTEM}"}
    talks: list[list[dict[str, Any]]] = [[system] for _ in range(chats)]
    seconds, prefill = 0.0, 0
    for turn in range(TURNS):
        for i, talk in enumerate(talks):
            talk.append({"role": "user", "content": questions[i * TURNS + turn]})
        done = jobs.run(engine, [tokenizer.prompt(talk) for talk in talks], tokens)
        found["first"][turn] += done.first
        seconds, prefill = seconds + done.seconds, prefill + done.prefill_tokens
        for talk, answer in zip(talks, done.answers, strict=True):
            talk.append({"role": "assistant", "content": tokenizer.tokenizer.decode(answer)})
    found["seconds"].append(seconds)
    found["prefill"].append(prefill)
