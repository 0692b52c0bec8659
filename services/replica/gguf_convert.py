"""Rewrites a GGUF file as a Hugging Face folder: safetensors, tokenizer, chat template.

``python -m services.replica.gguf_convert SOURCE.gguf FOLDER`` prints one line a step. Run in a
process of its own, because it imports torch; the folder must not exist yet, and whoever calls
renames it to its final place, so that an interruption leaves no half model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

# ``tokenizer.ggml.pre`` of models whose pre-tokenizer splits digits one by one before the usual
# byte-level pattern; transformers' own conversion leaves the digits out, which changes the ids
# of every number.
DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})


def convert(source: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``folder`` from ``source``. Raises whatever transformers finds wrong with the file."""
    fields = GGUFReader(source)
    _tell("reading the tokenizer")
    _write_tokenizer(source, folder, fields)
    _tell("unpacking the weights")
    _write_model(source, folder, dtype)
    _tell("checking the copy")
    _check(folder)


def _write_tokenizer(source: Path, folder: Path, fields: GGUFReader) -> None:
    fast = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    fast.save_pretrained(folder)
    if _field(fields, "tokenizer.ggml.pre") in DIGITS_FIRST:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(_field(fields, "tokenizer.ggml.add_bos_token")),
        "clean_up_tokenization_spaces": False,
    }
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        if (token := getattr(fast, name)) is not None:
            config[name] = str(token)
    architecture = _field(fields, "general.architecture")
    if context := _field(fields, f"{architecture}.context_length"):
        config["model_max_length"] = int(context)
    if template := _field(fields, "tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "chat_template.jinja").unlink(missing_ok=True)  # one place for it: the config
    _write_json(folder / "tokenizer_config.json", config)


def _write_model(source: Path, folder: Path, dtype: torch.dtype) -> None:
    packed = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=dtype,
    )
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # transformers refuses to save a model that came from GGUF; a fresh one with its weights
    # is an ordinary checkpoint.
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(packed.state_dict(), strict=True)
    plain.tie_weights()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(plain.generation_config, name, getattr(config, name, None))
    _tell("writing safetensors")
    plain.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    written.pop("_model_name_or_path", None)
    _write_json(folder / "config.json", written)
    for file in folder.iterdir():
        file.chmod(0o644)  # weights are no secret, and containers run under another user


def _check(folder: Path) -> None:
    """One forward step of the copy as it lies on disk: finite logits, or ValueError."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    if not bool(torch.isfinite(logits).all()):
        raise ValueError(f"{folder}: the converted model gives logits that are not finite")


def _field(fields: GGUFReader, name: str) -> Any:
    field = fields.get_field(name)
    return None if field is None else field.contents()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tell(step: str) -> None:
    print(step, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    convert(arguments.source, arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
