"""What a replica does on a GPU, against the same on the CPU. Skipped where there is none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.messages import Generate, Sampling
from tests.system.running import System
from tests.tiny import write_adapter

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

    from services.replica.gpu import open_meter, place_of

    meter = open_meter(place_of(SimpleNamespace(device=torch.device("cuda:0"))).gpu)
    assert meter is not None
    matrix = torch.rand(2048, 2048, device="cuda:0")
    for _ in range(200):
        matrix = (matrix @ matrix).clamp(0, 1)
    torch.cuda.synchronize()
    found = meter.read()
    assert found is not None
    utilisation, source = found
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


def _use_held_weights(handle_json: str, pipe: object) -> None:
    """In another process: open the memory, say what is there, wait to be ended."""
    import msgspec

    from services.replica.hand_over import Handle, receive

    weights = receive(msgspec.json.decode(handle_json, type=Handle))
    total = float(weights.views["model.norm.weight"].double().abs().sum())
    pipe.send_bytes(str(total).encode())  # type: ignore[attr-defined]
    pipe.recv_bytes()  # type: ignore[attr-defined]


def test_a_killed_user_leaves_the_weights_on_the_gpu_to_the_next(tiny_model: Path) -> None:
    """One copy on the device; each user opens it by a handle of its own."""
    import multiprocessing

    import msgspec
    import torch

    from services.replica.hand_over import CudaStore
    from services.replica.weights import open_fused

    mapped = open_fused(tiny_model, "float32")
    store = CudaStore(mapped, torch.device("cuda:0"))
    context = multiprocessing.get_context("spawn")
    wanted = float(mapped.views["model.norm.weight"].double().abs().sum())
    for _ in range(2):
        ours, theirs = context.Pipe()
        text = msgspec.json.encode(store.share()).decode()
        process = context.Process(target=_use_held_weights, args=(text, theirs), daemon=True)
        process.start()
        assert ours.poll(120)
        assert float(ours.recv_bytes()) == pytest.approx(wanted)
        process.kill()
        process.join()


def test_training_on_the_gpu_learns_as_on_the_cpu(tiny_model: Path) -> None:
    """Same seed and data: the first step's loss agrees, and the device's state is restored."""
    from services.replica.training.data import Example
    from services.replica.training.model import Adapter, LoraSpec, build_base
    from services.replica.training.trainer import Plan, Trainer
    from services.replica.weights import open_fused

    examples = [Example(ids=tuple(range(3, 19 + i)), learnt=(True,) * (16 + i)) for i in range(8)]
    spec = LoraSpec(r=4, lora_alpha=8.0, target_modules=("q_proj", "v_proj"))
    plan = Plan(B=2, accumulation=2)
    losses = {}
    for device in ("cpu", "cuda:0"):
        weights = open_fused(tiny_model, "float32").to(device)
        trainer = Trainer(
            Adapter.attach(build_base(tiny_model, weights.views), spec), examples, plan
        )
        losses[device] = trainer.step().loss
        tensors, numbers = trainer.state()
        trainer.restore({n: t.cpu() for n, t in tensors.items()}, numbers, weights=True)
        trainer.step()
        trainer.close()
    assert losses["cuda:0"] == pytest.approx(losses["cpu"], rel=1e-4)


def test_a_replica_says_which_gpu_it_has(tiny_model: Path) -> None:
    import pynvml

    from services.replica.gpu import open_meter, place_of

    place = place_of(_engine(tiny_model, "cuda:0"))
    assert place.device == "cuda:0"
    pynvml.nvmlInit()
    known = [
        pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i))
        for i in range(pynvml.nvmlDeviceGetCount())
    ]
    assert place.gpu in known
    assert open_meter(place.gpu) is not None
