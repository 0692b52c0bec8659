"""Training files, tokens and batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.replica.training import data
from shared import chat, training_data
from shared.training_data import Chat, DataError


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def talk(*turns: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": t, **more} for i, t in enumerate(turns)]
    return {"messages": messages}


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> chat.ChatTokenizer:
    return chat.load(tiny_folder)


def test_three_formats_give_the_same_chat(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", talk("add 1\n\n2", "3"))
    alpaca = tmp_path / "b.json"
    alpaca.write_text(json.dumps([{"instruction": "add 1", "input": "2", "output": "3"}]))
    turns = [{"from": "human", "value": "add 1\n\n2"}, {"from": "gpt", "value": "3"}]
    sharegpt = tmp_path / "c.json"
    sharegpt.write_text(json.dumps([{"conversations": turns}]))
    found = [
        [(m["role"], m["content"]) for m in training_data.load(p).chats[0].messages]
        for p in (lines, alpaca, sharegpt)
    ]
    assert found[0] == found[1] == found[2] == [("user", "add 1\n\n2"), ("assistant", "3")]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ('{"messages": [', "not JSON"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "assistant", "content": 5}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 2}]}, "weight"),
        ({"prompt": "x"}, "none of messages"),
        ("[]", "an object expected"),
    ],
)
def test_a_broken_line_is_named_and_skipped_only_if_asked(
    tmp_path: Path, broken: Any, reason: str
) -> None:
    path = write(tmp_path / "a.jsonl", talk("q", "a"), "", broken, talk("q", "b"))
    with pytest.raises(DataError, match=reason) as caught:
        training_data.load(path)
    assert caught.value.line == 3
    assert str(caught.value).startswith(f"{path}:3: ")
    loaded = training_data.load(path, skip_broken=True)
    assert len(loaded.chats) == 2
    assert [e.line for e in loaded.skipped] == [3]


def test_a_broken_array_element_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(
        '[\n{"instruction": "a",\n "output": "b"},\n{"instruction": "a"},\n'
        '{"instruction": "c", "output": "d"}\n]'
    )
    with pytest.raises(DataError) as caught:
        training_data.load(path)
    assert caught.value.line == 4
    assert len(training_data.load(path, skip_broken=True).chats) == 2
    path.write_text('[\n{"instruction": "a", "output": "b"},\n{"instruction" "a"}\n]')
    with pytest.raises(DataError) as caught:
        training_data.load(path, skip_broken=True)
    assert caught.value.line == 3


def test_a_file_that_is_absent_not_text_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        training_data.load(tmp_path / "none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"a": 1}\n\xff\xfe\n')
    with pytest.raises(DataError) as caught:
        training_data.load(tmp_path / "bytes.jsonl")
    assert caught.value.line == 2
    with pytest.raises(DataError, match="no chats"):
        training_data.load(write(tmp_path / "empty.jsonl", ""))


def test_the_split_is_by_question_and_nested() -> None:
    chats = [
        Chat(({"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}), i)
        for i in range(400)
    ]
    small, large = training_data.split(chats, 0.1), training_data.split(chats, 0.3)
    assert {c.line for c in small.heldout} <= {c.line for c in large.heldout}
    assert 80 < len(large.heldout) < 160
    again = training_data.split(chats[::-1], 0.3)
    assert {c.line for c in again.train} == {c.line for c in large.train}


def test_only_assistant_tokens_and_the_end_token_are_learnt(
    tokenizer: chat.ChatTokenizer,
) -> None:
    record = Chat(tuple(talk("hi", "yes", "and", "no")["messages"]), 1)
    example = data.encode_chat(record, tokenizer)
    learnt = [t for t, flag in zip(example.ids, example.learnt, strict=True) if flag]
    assert tokenizer.tokenizer.decode(learnt, skip_special_tokens=False) == (
        "yes<|im_end|>no<|im_end|>"
    )
    whole = tokenizer.render(record.messages, add_generation_prompt=False)
    assert list(example.ids) == tokenizer.encode(whole)


def test_the_prompt_part_is_what_the_gateway_sends(tokenizer: chat.ChatTokenizer) -> None:
    record = Chat(tuple(talk("hi", "yes")["messages"]), 1)
    example = data.encode_chat(record, tokenizer)
    prompt = tokenizer.prompt(record.messages[:1])
    assert list(example.ids[: len(prompt)]) == prompt
    assert not any(example.learnt[: len(prompt)])
    assert example.learnt[len(prompt)]


def test_an_answer_of_weight_0_is_not_learnt(tokenizer: chat.ChatTokenizer) -> None:
    messages = talk("hi", "bad", "again", "good")["messages"]
    messages[1]["weight"] = 0
    example = data.encode_chat(Chat(tuple(messages), 1), tokenizer)
    learnt = [t for t, flag in zip(example.ids, example.learnt, strict=True) if flag]
    assert tokenizer.tokenizer.decode(learnt, skip_special_tokens=False) == "good<|im_end|>"


def test_truncation_is_counted_and_logged(
    tokenizer: chat.ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    chats = [
        Chat(tuple(talk("q", "a" * 100)["messages"]), 1),
        Chat(tuple(talk("q" * 100, "a")["messages"]), 2),
        Chat(tuple(talk("q", "a")["messages"]), 3),
    ]
    encoded = data.encode(chats, tokenizer, 60, "x.jsonl")
    assert (encoded.truncated, encoded.dropped, len(encoded.examples)) == (1, 1, 2)
    assert max(len(e.ids) for e in encoded.examples) == 60
    assert "1 were cut at 60 tokens and 1 left out" in caplog.text


def test_padding_carries_no_loss_even_where_it_equals_the_end_token() -> None:
    examples = [
        data.Example((5, 6, 0), (False, True, True)),  # 0 is a token here, and learnt
        data.Example((5,) * 6, (True,) * 6),
    ]
    batch = data.collate(examples)
    assert batch.labels[0].tolist() == [-100, 6, 0, -100, -100, -100]
    assert batch.mask[0].tolist() == [1, 1, 1, 0, 0, 0]


def test_every_epoch_brings_each_example_once_and_a_cursor_resumes() -> None:
    examples = [data.Example(tuple(range(3 + i % 17)), (True,) * (3 + i % 17)) for i in range(150)]
    stream = data.Stream(examples, seed=3)
    taken: list[int] = []
    while stream.cursor.epoch == 0:
        if stream.cursor.position >= 150:
            break
        taken.append(int(stream.take(4).mask.sum()))
    assert sum(taken) == sum(len(e.ids) for e in examples)
    resumed = stream.at(data.Cursor(0, 40))
    other = data.Stream(examples, seed=3, cursor=data.Cursor(0, 40))
    for size in (4, 8, 2):
        assert resumed.take(size).ids.tolist() == other.take(size).ids.tolist()


def test_real_files_load(real_data: Path) -> None:
    for name, count in (("code.jsonl", 1000), ("alpaca_format.json", 200)):
        assert len(training_data.load(real_data / "instruct" / name).chats) == count
