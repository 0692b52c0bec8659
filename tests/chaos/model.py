"""The tiny model and its adapters, and what an undisturbed engine answers with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path

from tests import tiny

MODEL = "tiny"
ADAPTERS = ("red", "blue")
LEARNER = "green"  # trained by the federated session
CONTEXT = 512


def write(folder: Path) -> Path:
    """A random Llama whose greedy answers differ from prompt to prompt."""
    return tiny.write_model(folder, seed=7, max_position_embeddings=CONTEXT)


class Golden:
    """Greedy texts from an engine of our own that nobody disturbs (fp32, one request a time)."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        from services.replica.engines.torch.engine import TorchEngine

        self._engine = TorchEngine.load(
            model, name=MODEL, dtype="float32", threads=1, kv_tokens=4096, b_max=4
        )
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._known: dict[tuple[tuple[int, ...], str | None, str | None], list[int]] = {}
        self._loaded: set[tuple[str, str]] = set()
        self._serial = 0

    def text(
        self,
        prompt: tuple[int, ...],
        tokens: int,
        adapter: str | None,
        version: str | None,
        path: str | None,
    ) -> str:
        """The first ``tokens`` tokens as text."""
        key = (prompt, adapter, version)
        if len(self._known.get(key, ())) < tokens:
            self._known[key] = asyncio.run(self._generate(prompt, tokens, adapter, version, path))
        return self._tokenizer.decode(self._known[key][:tokens], skip_special_tokens=True)

    async def _generate(
        self,
        prompt: tuple[int, ...],
        tokens: int,
        adapter: str | None,
        version: str | None,
        path: str | None,
    ) -> list[int]:
        from shared.messages import Generate, Sampling

        if adapter is not None and version is not None and (adapter, version) not in self._loaded:
            assert path is not None, f"{adapter}@{version} has no folder"
            self._engine.load_adapter(adapter, version, path)
            self._loaded.add((adapter, version))
        self._serial += 1
        self._engine.submit(
            Generate(
                id=f"golden-{self._serial}",
                gateway="golden",
                model=MODEL,
                adapter=adapter,
                adapter_version=version,
                prompt=prompt,
                sampling=Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True),
                arrival=0.0,
            )
        )
        made: list[int] = []
        while self._engine.has_work():
            report = await self._engine.step()
            for _, output in report.outputs:
                made.extend(output.tokens)
        return made

    def close(self) -> None:
        self._engine.close()


def training_lines(domain: str, count: int) -> Iterable[str]:
    """Chats for a federated session: short, one domain a replica."""
    for i in range(count):
        messages = [
            {"role": "user", "content": f"{domain} question {i}"},
            {"role": "assistant", "content": f"{domain} answer {i % 7}"},
        ]
        yield json.dumps({"messages": messages})
