"""Constrained answers: whatever the (random) model wants, the text follows the schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.replica.engines.base import Rejected
from shared.messages import Sampling
from tests.engine.helpers import load, request, run, tokens

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


def constrained(seed: int, schema: str = json.dumps(SCHEMA)) -> Sampling:
    return Sampling(max_tokens=120, temperature=1.0, seed=seed, grammar=schema, stop_token_ids=(2,))


def test_every_constrained_answer_is_json_of_the_schema(tiny_model: Path) -> None:
    engine = load(tiny_model)
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    outputs = run(engine, [request(str(i), [5, 6], sampling=constrained(i)) for i in range(6)])
    for parts in outputs.values():
        answer = json.loads(tokenizer.decode([t for o in parts for t in o.tokens]))
        assert set(answer) == {"name", "size", "kind"}
        assert len(answer["name"]) <= 6
        assert 0 <= answer["size"] <= 99
        assert answer["kind"] in ("a", "b")
        assert parts[-1].finish == "stop"
    engine.close()


def test_a_constrained_continuation_stays_in_the_schema(tiny_model: Path) -> None:
    engine = load(tiny_model)
    whole = tokens(run(engine, [request("a", [5], sampling=constrained(3))]))["a"]
    rest = run(engine, [request("a", [5], sampling=constrained(3), generated=tuple(whole[:7]))])
    assert tokens(rest)["a"] == whole[7:]
    engine.close()


def test_a_schema_that_cannot_be_followed_is_refused(tiny_model: Path) -> None:
    engine = load(tiny_model)
    with pytest.raises(Rejected, match="schema cannot constrain") as caught:
        engine.submit(request("a", [5], sampling=constrained(0, '{"type": "objxect"}')))
    assert caught.value.param == "response_format"
    assert not engine.has_work()
    engine.close()
