"""The trainer on mapped weights: equal to plain PEFT, touching nothing but the adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.replica.training.data import Cursor, Example, Stream, collate
from services.replica.training.gate import OpenGate, Stopped
from services.replica.training.model import Adapter, LoraSpec, ModelError, build_base, mean_loss
from services.replica.training.trainer import Plan, Trainer
from services.replica.weights import FusedWeights, open_fused
from tests.training.conftest import SPEC

Examples = Sequence[Example]


def checksum(weights: FusedWeights) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights.fused):
        digest.update(weights.fused[name].numpy().tobytes())
    return digest.hexdigest()


def plain_peft_losses(folder: Path, examples: Examples, steps: int, plan: Plan) -> list[float]:
    """What anybody would write: from_pretrained, get_peft_model, labels, AdamW."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, SPEC.peft_config())
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=plan.learning_rate, weight_decay=0.0)
    stream = Stream(examples, plan.seed)
    found = []
    for _ in range(steps):
        total = 0.0
        for _ in range(plan.accumulation):
            batch = stream.take(plan.B)
            out = model(input_ids=batch.ids, attention_mask=batch.mask, labels=batch.labels)
            (out.loss / plan.accumulation).backward()
            total += float(out.loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, plan.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total / plan.accumulation)
    return found


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_losses_equal_a_plain_peft_loop(
    tiny_model: Path, base: torch.nn.Module, examples: Examples
) -> None:
    plan = Plan(B=3, accumulation=4, learning_rate=1e-2)
    trainer = Trainer(Adapter.attach(base, SPEC, 0), examples, plan)
    ours = [trainer.step().loss for _ in range(6)]
    assert ours == pytest.approx(plain_peft_losses(tiny_model, examples, 6, plan), rel=2e-4)
    assert ours[-1] < ours[0]


def test_a_larger_batch_than_the_rate_is_for_takes_larger_steps(
    base: torch.nn.Module, examples: Examples
) -> None:
    """As if the rate had been given for that batch."""
    found = []
    for plan in (
        Plan(B=8, accumulation=1, learning_rate=1e-2, rate_batch=2),
        Plan(B=8, accumulation=1, learning_rate=2e-2),
    ):
        adapter = Adapter.attach(base, SPEC, 0)
        trainer = Trainer(adapter, examples, plan)
        found.append([trainer.step().loss for _ in range(3)])
        trainer.close()
        base = adapter.detach()
    assert found[0] == found[1]


def test_only_the_adapter_moves_and_nothing_was_copied(
    weights: FusedWeights, base: torch.nn.Module, examples: Examples
) -> None:
    """A reload of PEFT once left the serving adapter trainable: here only one thing can move."""
    before = checksum(weights)
    pointers = {t.untyped_storage().data_ptr() for t in weights.views.values()}
    adapter = Adapter.attach(base, SPEC, 0)
    start = adapter.flat.clone()
    trainer = Trainer(adapter, examples, Plan(B=4, accumulation=2, learning_rate=1e-2))
    for _ in range(30):
        trainer.step()
    assert checksum(weights) == before
    assert not torch.equal(adapter.flat, start)
    frozen = [p for n, p in adapter.model.named_parameters() if ".lora_" not in n]
    assert frozen
    assert all(p.untyped_storage().data_ptr() in pointers for p in frozen)
    assert not any(p.requires_grad for p in frozen)


def test_two_adapters_train_one_after_another(base: torch.nn.Module, examples: Examples) -> None:
    """With PEFT's active adapter a second one was silently left as it was."""
    changed = []
    for spec in (SPEC, LoraSpec(r=2, lora_alpha=2.0, target_modules=("k_proj", "up_proj"))):
        adapter = Adapter.attach(base, spec, 1)
        start = adapter.flat.clone()
        trainer = Trainer(adapter, examples, Plan(B=2, accumulation=2))
        trainer.step()
        trainer.close()
        changed.append(not torch.equal(adapter.flat, start))
        base = adapter.detach()
        assert not any(".lora_" in n for n, _ in base.named_parameters())
    assert changed == [True, True]


def test_a_resumed_run_equals_an_uninterrupted_one(
    tiny_model: Path, weights: FusedWeights, examples: Examples
) -> None:
    spec = LoraSpec(r=4, lora_alpha=8.0, target_modules=("q_proj",), lora_dropout=0.2)
    plan = Plan(B=3, accumulation=2, learning_rate=1e-2, schedule="cosine", total_steps=8, seed=5)

    def fresh() -> Trainer:
        model = build_base(tiny_model, weights.views)
        torch.manual_seed(11)
        return Trainer(Adapter.attach(model, spec, 2), examples, plan)

    whole = fresh()
    for _ in range(8):
        whole.step()
    first = fresh()
    for _ in range(3):
        first.step()
    tensors, numbers = first.state()
    torch.manual_seed(999)
    second = fresh()
    second.restore(tensors, numbers, weights=True)
    results = [second.step() for _ in range(5)]
    assert torch.equal(second.adapter.flat, whole.adapter.flat)
    assert results[-1].noise_scale == whole.noise.scale if whole.noise else None


def test_a_stop_in_mid_step_leaves_weights_and_place_in_the_data(
    base: torch.nn.Module, examples: Examples
) -> None:
    class Stopping(OpenGate):
        calls = 0

        def inside(self) -> float:
            self.calls += 1
            if self.calls > 10:
                raise Stopped("enough")
            return 0.0

    adapter = Adapter.attach(base, SPEC, 0)
    trainer = Trainer(adapter, examples, Plan(B=2, accumulation=8), Stopping())
    start = adapter.flat.clone()
    with pytest.raises(Stopped):
        trainer.step()
    assert torch.equal(adapter.flat, start)
    assert trainer.cursor == Cursor(0, 0)
    assert trainer.steps_done == 0


def test_infinite_gradients_are_left_out(base: torch.nn.Module, examples: Examples) -> None:
    adapter = Adapter.attach(base, SPEC, 0)
    trainer = Trainer(adapter, examples, Plan(B=2, accumulation=4))
    calls = []

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * float("nan") if len(calls) == 2 else gradient

    handle = adapter.parameters[-1].register_hook(poison)
    result = trainer.step()
    handle.remove()
    assert result.samples == 6
    assert bool(torch.isfinite(adapter.flat).all())


@pytest.mark.parametrize(("freeze", "moving"), [("A", "B"), ("B", "A")])
def test_a_frozen_factor_stays(
    base: torch.nn.Module, examples: Examples, freeze: str, moving: str
) -> None:
    adapter = Adapter.attach(base, SPEC, 0)
    tensors = {n: torch.randn_like(t) * 0.1 for n, t in adapter.tensors().items()}
    adapter.load(tensors)
    trainer = Trainer(adapter, examples, Plan(B=2, accumulation=2, freeze=freeze, proximal=0.1))
    trainer.step()
    trainer.step()
    changed = {n for n, t in adapter.tensors().items() if not torch.equal(t, tensors[n])}
    assert changed == {n for n in tensors if f".lora_{moving}." in n}


def test_the_proximal_term_holds_the_adapter_near_its_start(
    tiny_model: Path, weights: FusedWeights, examples: Examples
) -> None:
    moved = {}
    for mu in (0.0, 10.0):
        adapter = Adapter.attach(build_base(tiny_model, weights.views), SPEC, 0)
        start = adapter.flat.clone()
        plan = Plan(B=4, accumulation=2, learning_rate=1e-2, proximal=mu)
        trainer = Trainer(adapter, examples, plan)
        for _ in range(10):
            trainer.step()
        moved[mu] = float((adapter.flat - start).norm())
    assert moved[10.0] < 0.8 * moved[0.0]


def test_gradient_checkpointing_changes_no_loss(
    tiny_model: Path, weights: FusedWeights, examples: Examples
) -> None:
    found = []
    for checkpointing in (False, True):
        adapter = Adapter.attach(build_base(tiny_model, weights.views), SPEC, 0)
        plan = Plan(B=4, accumulation=2, gradient_checkpointing=checkpointing)
        trainer = Trainer(adapter, examples, plan)
        found.append([trainer.step().loss for _ in range(3)])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_loss_reduction_is_against_the_step_before(
    base: torch.nn.Module, examples: Examples
) -> None:
    trainer = Trainer(Adapter.attach(base, SPEC, 0), examples, Plan(B=2, accumulation=2))
    first, second = trainer.step(), trainer.step()
    assert first.loss_reduction == 0.0
    assert second.loss_reduction == pytest.approx(first.loss - second.loss)


def test_bf16_base_with_fp32_adapter(tiny_model: Path, examples: Examples) -> None:
    weights = open_fused(tiny_model, "bfloat16")
    adapter = Adapter.attach(build_base(tiny_model, weights.views), SPEC, 0)
    assert {p.dtype for p in adapter.parameters} == {torch.float32}
    loss = mean_loss(adapter.model, collate(examples[:2]))
    torch.autograd.backward(loss)
    assert float(adapter.flat_grad.norm()) > 0


def test_tensors_that_do_not_fit_change_nothing(base: torch.nn.Module) -> None:
    adapter = Adapter.attach(base, SPEC, 0)
    start = adapter.flat.clone()
    good = {n: t + 1 for n, t in adapter.tensors().items()}
    name = adapter.names[-1]
    for bad in (
        {**good, name: good[name][:1]},
        {**good, name: good[name] * float("inf")},
        {n: t for n, t in good.items() if n != name},
        {**good, "extra": good[name]},
    ):
        with pytest.raises(ModelError):
            adapter.load(bad)
        assert torch.equal(adapter.flat, start)


def test_unknown_target_modules_are_refused(base: torch.nn.Module) -> None:
    with pytest.raises(ModelError, match="no_such"):
        Adapter.attach(base, LoraSpec(4, 8.0, ("no_such",)))
