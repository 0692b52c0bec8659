"""Prompt files in three forms, cut or repeated to a length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.prompts import ByCharacters, ByTokenizer, PromptError, Prompts, load
from shared.chat import load as load_chat
from shared.split import is_inference, sample_id


def chat(question: str, answer: str = "yes") -> dict[str, object]:
    return {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def test_three_forms_give_the_same_sample(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat("q")["messages"][1:]}))  # type: ignore[index]
    (tmp_path / "alpaca.json").write_text(
        json.dumps([{"instruction": "q", "input": "", "output": "yes"}])
    )
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "yes"}]
    (tmp_path / "sharegpt.json").write_text(json.dumps([{"conversations": turns}]))
    samples = [load([path], split="all")[0] for path in sorted(tmp_path.iterdir())]
    assert len({(s.id, s.messages[-1]["content"], s.reference) for s in samples}) == 1


def test_the_split_keeps_about_thirty_percent_and_is_the_same_each_time(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(chat(f"question {k}")) for k in range(1000)))
    asked = load([path])
    assert 240 < len(asked) < 360
    assert [s.id for s in asked] == [s.id for s in load([path])]
    assert all(is_inference(sample_id(s.messages[1]["content"])) for s in asked)


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": [{"role": "user"',
        '{"text": "x"}',
        '{"messages": []}',
        '{"messages": [{"role": "user", "content": 5}]}',
        '"just text"',
    ],
)
def test_a_bad_line_is_reported_with_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(chat("fine")) + "\n\n" + line + "\n")
    with pytest.raises(PromptError, match=r"chats\.jsonl:3"):
        load([path], split="all")


def test_only_the_question_is_shaped(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(chat("how?")))
    prompts = Prompts(load([path], split="all"), ByCharacters(), seed=0)
    messages = prompts.messages(next(iter(prompts)), 100)
    assert messages[0]["content"] == "Be brief."
    assert len(messages[1]["content"]) == 400
    assert prompts.messages(next(iter(prompts)), None)[1]["content"] == "how?"


@pytest.mark.parametrize("tokens", [90, 117, 500])
def test_a_tokenizer_gives_the_length_of_the_whole_prompt(tiny_folder: Path, tokens: int) -> None:
    lengths = ByTokenizer(tiny_folder)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a question of some length"},
    ]
    shaped = [messages[0], {"role": "user", "content": lengths.shape(messages, tokens)}]
    assert len(load_chat(tiny_folder).prompt(shaped)) == tokens


def test_without_a_template_only_the_text_counts(tiny_folder: Path) -> None:
    lengths = ByTokenizer(tiny_folder, templated=False)
    text = lengths.shape([{"role": "user", "content": "a question"}], 17)
    assert len(load_chat(tiny_folder).encode(text)) == 17


def test_a_missing_tokenizer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"tokenizer\.json"):
        ByTokenizer(tmp_path)


def test_no_prompt_left_is_an_error() -> None:
    with pytest.raises(PromptError, match="no prompt is left"):
        Prompts([], ByCharacters(), seed=0)
