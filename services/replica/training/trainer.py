"""One optimiser step after another over an adapter: accumulation, clipping, statistics.

Knows nothing of Redis, rq or files. Whoever drives it decides when to publish and when to stop;
a ``Gate`` is asked before every micro-step and between layers whether training may go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from services.replica.training import statistics
from services.replica.training.data import Cursor, Example, Stream, collate
from services.replica.training.gate import Gate, OpenGate
from services.replica.training.model import Adapter, losses, mean_loss


@dataclass(frozen=True)
class Plan:
    """How to train. Sizes in samples, lengths in steps."""

    B: int = 4
    accumulation: int = 8
    learning_rate: float = 5e-4
    rate_batch: int = 0  # micro-batch that the rate is for; 0: any
    schedule: str = "constant"
    total_steps: int = 0  # of the whole session, for the cosine
    warmup_steps: int = 0
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    proximal: float = 0.0  # FedProx: mu / 2 |w - w_start|^2
    freeze: str = "none"  # "none" | "A" | "B"
    gradient_checkpointing: bool = False
    seed: int = 0


@dataclass(frozen=True)
class StepResult:
    """One optimiser step. Seconds exclude waits; losses in nats per token."""

    step: int
    loss: float
    loss_reduction: float
    B: int
    samples: int
    tokens: int
    micro_seconds: tuple[float, ...]
    wait_seconds: float
    beside: float  # mean number of requests decoding beside the micro-steps
    gradient_norm: float
    noise_scale: float | None


@dataclass(frozen=True)
class _Micro:
    loss: float
    square: float
    samples: int
    tokens: int
    seconds: float
    waited: float
    beside: int


class Trainer:
    """Trains ``adapter`` on ``examples``; the state that a restart needs is ``state()``."""

    def __init__(
        self,
        adapter: Adapter,
        examples: Sequence[Example],
        plan: Plan,
        gate: Gate | None = None,
        cursor: Cursor | None = None,
    ) -> None:
        self.adapter, self.plan, self.gate = adapter, plan, gate or OpenGate()
        self.B = plan.B
        self.steps_done = 0
        self.noise: statistics.Noise | None = None
        self.last_loss: float | None = None
        self._stream = Stream(examples, plan.seed, cursor)
        adapter.freeze(plan.freeze)
        self._start = adapter.flat.clone() if plan.proximal else None
        self.optimizer = torch.optim.AdamW(
            adapter.trainable(),
            lr=plan.learning_rate,
            weight_decay=plan.weight_decay,
            fused=True,
        )
        self._prepare_model()
        self._waited_inside = self._mean_square = 0.0
        self._hooks = [layer.register_forward_hook(self._after_layer) for layer in self._layers()]

    def _prepare_model(self) -> None:
        """Checkpointing on or off; transformers 5 calls it activation checkpointing."""
        base = self.adapter.model.get_base_model()
        kind = "activation" if hasattr(base, "activation_checkpointing_enable") else "gradient"
        if self.plan.gradient_checkpointing:
            getattr(base, f"{kind}_checkpointing_enable")({"use_reentrant": False})
        else:
            getattr(base, f"{kind}_checkpointing_disable")()

    def _layers(self) -> list[nn.Module]:
        found: list[nn.Module] = list(self.adapter.model.get_base_model().model.layers)
        return found

    def _after_layer(self, layer: nn.Module, inputs: object, output: object) -> None:
        """Look at the gate after the layer, and again when its gradient comes back."""
        self._look(None)
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(self._look)  # type: ignore[no-untyped-call]

    def _look(self, _: Tensor | None) -> None:
        self._waited_inside += self.gate.inside()

    def close(self) -> None:
        """Take the hooks out; the adapter stays as trained."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def cursor(self) -> Cursor:
        return self._stream.cursor

    # ------------------------------------------------------------ training

    def step(self) -> StepResult:
        """``accumulation`` micro-steps and one update. Raises what the gate raises (the
        step is then void: weights and optimiser are as before)."""
        plan, flat_grad = self.plan, self.adapter.flat_grad
        flat_grad.zero_()
        before = torch.zeros_like(flat_grad)
        kept: list[_Micro] = []
        every: list[_Micro] = []
        begun = self._stream.cursor
        B = self.B
        try:
            for _ in range(plan.accumulation):
                micro = self._micro_step(before, B)
                every.append(micro)
                if math.isfinite(micro.square):
                    kept.append(micro)
        except BaseException:
            self._stream = self._stream.at(begun)
            raise
        norm = self._update(len(kept))
        return self._result(B, kept, every, norm)

    def _micro_step(self, before: Tensor, B: int) -> _Micro:
        """One forward and backward; ``before`` holds the gradient sum so far and is updated.

        A gradient that is not finite is taken back; its ``square`` is then not finite.
        """
        waited = self.gate.before_micro_step(B)
        batch = self._stream.take(B).to(self.adapter.device)
        beside, self._waited_inside = self.gate.beside(), 0.0
        started = time.perf_counter()
        self.adapter.model.train()
        loss = mean_loss(self.adapter.model, batch)
        torch.autograd.backward(loss)
        change = self.adapter.flat_grad - before
        square = float(change.square_().sum())
        if math.isfinite(square):
            before.copy_(self.adapter.flat_grad)
        else:
            self.adapter.flat_grad.copy_(before)
        seconds = time.perf_counter() - started - self._waited_inside
        micro = _Micro(
            loss=float(loss.detach()),
            square=square,
            samples=batch.ids.shape[0],
            tokens=batch.tokens,
            seconds=seconds,
            waited=waited + self._waited_inside,
            beside=beside,
        )
        self.gate.after_micro_step(seconds, micro.samples, micro.tokens)
        return micro

    def _update(self, count: int) -> float:
        """Mean of ``count`` micro-gradients, clipped, applied. Returns its norm before that."""
        if count == 0:
            self.adapter.flat_grad.zero_()
            return math.nan
        flat_grad = self.adapter.flat_grad
        flat_grad.div_(count)
        self._mean_square = float(flat_grad.square().sum())
        if self._start is not None:
            flat_grad.add_(self.adapter.flat - self._start, alpha=self.plan.proximal)
            self._zero_frozen_gradients()
        norm = float(flat_grad.norm())
        flat_grad.mul_(min(1.0, self.plan.clip_norm / (norm + 1e-6)))
        rate = statistics.learning_rate(
            self.plan.learning_rate,
            self.steps_done,
            schedule=self.plan.schedule,
            total=self.plan.total_steps,
            warmup=self.plan.warmup_steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate * statistics.rate_factor(self.B, self.plan.rate_batch)
        self.optimizer.step()
        return norm

    def _zero_frozen_gradients(self) -> None:
        for parameter in self.adapter.parameters:
            if not parameter.requires_grad and parameter.grad is not None:
                parameter.grad.zero_()

    def _result(self, B: int, kept: list[_Micro], every: list[_Micro], norm: float) -> StepResult:
        self.steps_done += 1
        loss = sum(m.loss for m in kept) / len(kept) if kept else math.nan
        if kept:
            mean_samples = sum(m.samples for m in kept) / len(kept)
            found = statistics.estimate_noise(
                [m.square for m in kept], self._mean_square, mean_samples
            )
            self.noise = statistics.smooth(self.noise, found)
        reduction = 0.0 if self.last_loss is None or not kept else self.last_loss - loss
        self.last_loss = loss if kept else self.last_loss
        return StepResult(
            step=self.steps_done,
            loss=loss,
            loss_reduction=reduction,
            B=B,
            samples=sum(m.samples for m in kept),
            tokens=sum(m.tokens for m in every),
            micro_seconds=tuple(m.seconds for m in every),
            wait_seconds=sum(m.waited for m in every),
            beside=sum(m.beside for m in every) / len(every),
            gradient_norm=norm,
            noise_scale=None if self.noise is None else self.noise.scale,
        )

    # ------------------------------------------------------------ evaluation

    def evaluate(self, examples: Sequence[Example], B: int | None = None) -> float:
        """Cross-entropy over all learnt tokens of ``examples``, nats per token."""
        model, total, count = self.adapter.model, 0.0, 0
        model.eval()
        size = B or self.plan.B
        ordered = sorted(examples, key=lambda e: len(e.ids))
        with torch.no_grad():
            for start in range(0, len(ordered), size):
                self.gate.before_micro_step(len(ordered[start : start + size]))
                batch = collate(ordered[start : start + size]).to(self.adapter.device)
                found, _ = losses(model, batch)
                self.gate.release()
                total, count = total + float(found.sum()), count + found.numel()
        return total / count

    # ------------------------------------------------------------ state

    def state(self) -> tuple[dict[str, Tensor], dict[str, float | int | None]]:
        """Tensors and numbers that ``restore`` needs, the weights included."""
        tensors = {"flat": self.adapter.flat.clone(), "rng": torch.random.get_rng_state()}
        if self.adapter.device.type == "cuda":
            tensors["rng_cuda"] = torch.cuda.get_rng_state(self.adapter.device)
        numbers: dict[str, float | int | None] = {
            "steps_done": self.steps_done,
            "epoch": self.cursor.epoch,
            "position": self.cursor.position,
            "last_loss": self.last_loss,
            "noise_gradient": None if self.noise is None else self.noise.gradient,
            "noise_trace": None if self.noise is None else self.noise.trace,
            "noise_count": None if self.noise is None else self.noise.count,
        }
        for name, parameter in zip(self.adapter.names, self.adapter.parameters, strict=True):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value.detach().clone()
        return tensors, numbers

    def restore(
        self,
        tensors: dict[str, Tensor],
        numbers: dict[str, float | int | None],
        *,
        weights: bool,
    ) -> None:
        """Go on from ``state()``; without ``weights`` the adapter keeps those it has."""
        if weights:
            with torch.no_grad():
                self.adapter.flat.copy_(tensors["flat"])
        torch.random.set_rng_state(tensors["rng"])
        if self.adapter.device.type == "cuda" and "rng_cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng_cuda"], self.adapter.device)
        self.steps_done = int(numbers["steps_done"] or 0)
        self.last_loss = numbers["last_loss"]
        gradient, trace = numbers["noise_gradient"], numbers["noise_trace"]
        if gradient is not None and trace is not None:
            self.noise = statistics.Noise(gradient, trace, int(numbers.get("noise_count") or 1))
        self._stream = self._stream.at(
            Cursor(int(numbers["epoch"] or 0), int(numbers["position"] or 0))
        )
        for name, parameter in zip(self.adapter.names, self.adapter.parameters, strict=True):
            if parameter.requires_grad and f"step.{name}" in tensors:
                self.optimizer.state[parameter] = {
                    key: tensors[f"{key}.{name}"].to(parameter.device, copy=True)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
