"""Text out of tokens, piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from services.gateway.text import StopScanner, Vocabulary
from tests import tiny

FOLDER = Path("/nonexistent")


def byte_level(tmp: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(tiny.write_tokenizer(tmp) / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("漢字")])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Byte fallback and a metaspace, as in Llama 2."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁b", "é"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="module", params=["byte level", "sentencepiece"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    if request.param == "byte level":
        return byte_level(tmp_path_factory.mktemp("tok"))
    return sentencepiece()


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_pieces_together_are_the_full_decoding(tokenizer, data):
    """Of any tokens; with byte fallback, whose whole runs of bytes are valid or not, of texts."""
    vocabulary = Vocabulary(tokenizer)
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    else:
        text = data.draw(st.text(alphabet="ab €😀é漢", max_size=20))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
    cuts = data.draw(st.lists(st.integers(1, 5), min_size=len(ids), max_size=len(ids)))
    detokenizer = vocabulary.detokenizer()
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(detokenizer.push(ids[at : at + cut]))
        at += cut
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert vocabulary.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


@given(text=st.text(alphabet="a€😀é漢 b", max_size=20))
@settings(max_examples=100, deadline=None)
def test_valid_text_never_shows_a_replacement_character(tokenizer, text):
    vocabulary = Vocabulary(tokenizer)
    detokenizer = vocabulary.detokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = [detokenizer.push((token,)) for token in ids]
    assert not any("\ufffd" in p for p in pieces)


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 4), min_size=30, max_size=30),
    include=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_a_stop_string_is_found_wherever_the_pieces_are_cut(text, stops, cuts, include):
    scanner, shown, at, met = StopScanner(stops, include), "", 0, False
    for cut in cuts:
        piece = text[at : at + cut]
        at += cut
        out, met = scanner.push(piece)
        shown += out
        if met:
            break
        assert include or not any(stop in shown for stop in stops)
    if not met:
        shown += scanner.flush()
        assert shown == text
        assert not any(stop in text for stop in stops)
        return
    found = [(i + len(stop), i) for stop in stops if (i := text.find(stop)) >= 0]
    end, start = min(found)
    assert shown == (text[:end] if include else text[:start])
