"""Driving an engine in tests; models of every architecture; adapters by PEFT."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from services.replica.engines.torch import TorchEngine
from shared.messages import Generate, Output, Sampling
from tests import tiny

# Fields of config.json over tests.tiny's Llama, per architecture.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama2": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "smollm2": {
        "hidden_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 40,
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_architecture(folder: Path, kind: str) -> Path:
    """A tiny random checkpoint; biases and head norms are made random too."""
    from safetensors.torch import load_file, save_file

    tiny.write_model(folder, seed=3, **ARCHITECTURES[kind])
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if name.endswith("bias") or "norm" in name:
            noise = torch.randn(tensor.shape, generator=generator) * 0.2
            tensors[name] = tensor + noise.to(tensor.dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def prompts(count: int, *, seed: int = 0, longest: int = 90) -> list[list[int]]:
    """Random prompts of mixed length over the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, tiny.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def load(folder: Path, **changes: Any) -> TorchEngine:
    settings: dict[str, Any] = {
        "name": "tiny",
        "dtype": "float32",
        "threads": 1,
        "kv_tokens": 8192,
        "max_step_tokens": 64,
        "step_seconds": 1e9,
    }
    return TorchEngine.load(folder, **{**settings, **changes})


def request(name: str, prompt: Iterable[int], max_tokens: int = 16, **fields: Any) -> Generate:
    """A greedy request unless ``sampling`` says otherwise."""
    sampling = fields.pop("sampling", None) or Sampling(
        max_tokens=max_tokens, temperature=0.0, stop_token_ids=fields.pop("stops", ())
    )
    return Generate(
        id=name,
        gateway="gateway-0",
        model="tiny",
        prompt=tuple(prompt),
        sampling=sampling,
        arrival=0.0,
        **fields,
    )


def run(engine: TorchEngine, requests: Sequence[Generate] = ()) -> dict[str, list[Output]]:
    """Submit, step until nothing is left; each request's outputs, offsets checked."""
    for one in requests:
        engine.submit(one)
    outputs: dict[str, list[Output]] = {}
    while engine.has_work():
        for _, output in engine.step_now().outputs:
            outputs.setdefault(output.id, []).append(output)
    return outputs


def tokens(outputs: dict[str, list[Output]]) -> dict[str, list[int]]:
    return {name: [t for o in parts for t in o.tokens] for name, parts in outputs.items()}


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def generate(model: Any, prompt: list[int], count: int, stops: Sequence[int] = ()) -> list[int]:
    """What transformers' own generate answers, greedily."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=list(stops) or None,
        pad_token_id=0,
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def greedy(
    model: Any, prompt: list[int], answer: list[int], count: int, *, stop: int | None = None
) -> bool:
    """Whether generate would have answered so: each token the best after those before it.

    One pass over prompt and answer instead of a step a token, so that fifty prompts take seconds.
    """
    if len(answer) != count and answer[-1:] != [stop]:
        return False
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    best: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return best == answer and stop not in answer[:-1]


def write_adapter(
    folder: Path,
    out: Path,
    *,
    seed: int,
    r: int = 4,
    targets: Sequence[str] = TARGETS,
    **config: Any,
) -> Path:
    """A PEFT adapter with large random matrices, saved by PEFT itself."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    settings = {"lora_alpha": 8, **config}
    model = get_peft_model(
        transformers_model(folder),
        LoraConfig(r=r, target_modules=list(targets), task_type="CAUSAL_LM", **settings),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(out)
    return out


def peft_model(folder: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(transformers_model(folder), adapter)
