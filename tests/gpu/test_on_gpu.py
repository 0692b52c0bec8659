"""What a replica does on a GPU, against the same on the CPU. Skipped where there is none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.messages import Generate, Sampling
from tests.chaos.model import write_adapter
from tests.system.running import System

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 17, 40)]


def _generate(engine: object, adapter: str | None = None) -> list[list[int]]:
    """Greedy tokens of every prompt, all in one running batch."""

    async def run() -> list[list[int]]:
        tokens: dict[str, list[int]] = {}
        for i, prompt in enumerate(PROMPTS):
            tokens[str(i)] = []
            engine.submit(  # type: ignore[attr-defined]
                Generate(
                    id=str(i), gateway="g", model="tiny", adapter=adapter, prompt=prompt,
                    sampling=Sampling(max_tokens=12, temperature=0.0, ignore_eos=True),
                    arrival=0.0,
                )
            )  # fmt: skip
        while engine.has_work():  # type: ignore[attr-defined]
            report = await engine.step()  # type: ignore[attr-defined]
            for _, output in report.outputs:
                tokens[output.id] += output.tokens
        return list(tokens.values())

    return asyncio.run(run())


def _engine(folder: Path, device: str, **options: object) -> object:
    from services.replica.engines.torch.engine import TorchEngine

    return TorchEngine.load(
        folder,
        name="tiny",
        dtype="float32",
        kv_tokens=4096,
        kernels="torch",
        device=device,
        **options,  # type: ignore[arg-type]
    )


def test_the_engine_computes_the_same_tokens_as_on_the_cpu(tiny_model: Path) -> None:
    on_gpu = _engine(tiny_model, "cuda:0")
    assert str(on_gpu.device) == "cuda:0"  # type: ignore[attr-defined]
    assert _generate(on_gpu) == _generate(_engine(tiny_model, "cpu"))


def test_adapters_compute_the_same_tokens_as_on_the_cpu(tiny_model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tiny_model, tmp_path / "law", seed=3)
    found = []
    for device in ("cuda:0", "cpu"):
        engine = _engine(tiny_model, device)
        engine.load_adapter("law", "v1", str(adapter))  # type: ignore[attr-defined]
        found.append(_generate(engine, "law"))
    assert found[0] == found[1]
    assert found[0] != _generate(_engine(tiny_model, "cuda:0"))


def test_the_weights_lie_on_the_gpu_once(tiny_model: Path) -> None:
    """The members of a fused matrix are views of it there too."""
    from services.replica.weights import open_fused

    weights = open_fused(tiny_model, "float32").to("cuda:0")
    fused = weights.fused["model.layers.0.self_attn.qkv_proj.weight"]
    member = weights.views["model.layers.0.self_attn.k_proj.weight"]
    assert member.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()


def test_nvml_tells_the_utilisation_and_where_it_is_from() -> None:
    import torch

    from services.replica.gpu import GpuMeter

    meter = GpuMeter(0)
    matrix = torch.rand(2048, 2048, device="cuda:0")
    for _ in range(200):
        matrix = (matrix @ matrix).clamp(0, 1)
    torch.cuda.synchronize()
    utilisation, source = meter.read()
    assert 0.0 <= utilisation <= 1.0
    assert source in ("sm_util", "utilization.gpu")


def test_a_system_serves_and_trains_with_a_gpu(tmp_path: Path, tiny_model: Path) -> None:
    """`auto` takes the GPU; training beside it publishes an adapter that is then served."""
    from tests.journey.conftest import EAGER

    config = tmp_path / "eager.yaml"
    config.write_text(EAGER.replace("min_participants: 3", "min_participants: 1"))
    options = ("--model", f"{tiny_model}:1", "--served-model-name", "tiny")
    variables = {"COLLM_CONFIG": str(config)}
    with System(tmp_path / "data", *options, variables=variables, start_seconds=200) as system:
        client = system.client()
        data = Path(__file__).resolve().parents[2] / "examples" / "data" / "returns.jsonl"
        file = client.files.create(file=(data.name, data.read_bytes()), purpose="fine-tune")
        job = client.fine_tuning.jobs.create(
            model="tiny", training_file=file.id, suffix="gpu",
            metadata={"max_rounds": "1", "local_steps": "1", "rank": "4"},
        )  # fmt: skip
        while (now := client.fine_tuning.jobs.retrieve(job.id)).status != "succeeded":
            assert now.status not in ("failed", "cancelled"), now.error
        answer = client.completions.create(model=str(now.fine_tuned_model), prompt="a")
        assert answer.choices[0].finish_reason in ("stop", "length")
