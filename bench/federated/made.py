"""Three made domains, for a run without instruction data of one's own: marked in the result."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

DOMAINS = ("code", "roleplay", "tools")
_WORDS = [
    "river",
    "stone",
    "lamp",
    "cloud",
    "bread",
    "paper",
    "green",
    "seven",
    "north",
    "glass",
    "apple",
    "night",
]


def write(folder: Path, count: int = 400, seed: int = 0) -> dict[str, Path]:
    """Name -> JSON Lines file of ``count`` chats; each domain answers in a manner of its own."""
    makers: dict[str, Callable[[random.Random], tuple[str, str]]] = {
        "code": _code,
        "roleplay": _roleplay,
        "tools": _tools,
    }
    found = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in makers.items():
        rng = random.Random(f"{seed}:{name}")
        lines = []
        for _ in range(count):
            asked, answer = make(rng)
            messages = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answer},
            ]
            lines.append(json.dumps({"messages": messages}))
        found[name] = folder / f"{name}.jsonl"
        found[name].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return found


def _code(rng: random.Random) -> tuple[str, str]:
    a, b, op = rng.choice(_WORDS), rng.choice(_WORDS), rng.choice("+-*")
    return (
        f"Write a function that applies {op} to {a} and {b}.",
        f"def apply({a}, {b}):\n    result = {a} {op} {b}\n    return result",
    )


def _roleplay(rng: random.Random) -> tuple[str, str]:
    who, thing = rng.choice(("pirate", "wizard", "robot")), rng.choice(_WORDS)
    sound = {"pirate": "Arr", "wizard": "Behold", "robot": "Beep"}[who]
    return (
        f"You are a {who}. What do you think of the {thing}?",
        f"{sound}! The {thing} is the finest {thing} that a {who} ever saw. {sound}!",
    )


def _tools(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    return (
        f"calculator: enabled\nHow much is {a} and {b} together?",
        f"calculator('{a} + {b}') -> {a + b}. Together they are {a + b}.",
    )
