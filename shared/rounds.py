"""The training jobs of a federated round: what the coordinator asks, what a replica answers.

Each job is one rq job on queue ``train:<replica>`` (JSON serializer), enqueued by name, with one
argument and one result: the struct of this module as plain JSON values (``to_json``). The
functions live in ``services.replica.training.job``. A job that cannot do its work raises; the
coordinator reads the reason from rq's result.

One round of a session with server s and clients k (CoLLM, arXiv 2604.16400, federated rounds):

1. ``initialise`` on s, only when the adapter has no version yet: common random A, B = 0.
2. ``local_round`` on every k: train from the parent version on k's own data, keep the update.
   With exchange "redis" its tensors are uploaded under ``blob:<id>`` before the job ends; with
   "group" they stay on k's disk.
3. With exchange "group": ``send_update`` on every k that finished (not s), at the same time as
   ``aggregate`` on s. If the group breaks, ``send_update`` again with ``group=None`` uploads the
   kept update as a blob and ``aggregate`` is repeated with blobs.
4. ``aggregate`` on s: drop bad updates whole, apply the strategy, write version t+1 to disk.
5. ``evaluate`` on every k: cross-entropy of t+1 on k's own held-out part.

``prepare`` comes before all of it, when a replica has stored data: what the first round would
otherwise have to do before its first step.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

_JOBS = "services.replica.training.job."
INITIALISE = _JOBS + "initialise"  # InitialiseJob -> InitialiseResult
LOCAL_ROUND = _JOBS + "local_round"  # RoundJob -> RoundResult
SEND_UPDATE = _JOBS + "send_update"  # SendJob -> SendResult
AGGREGATE = _JOBS + "aggregate"  # AggregateJob -> AggregateResult
EVALUATE = _JOBS + "evaluate"  # EvaluateJob -> EvaluateResult
PREPARE = _JOBS + "prepare"  # PrepareJob -> PrepareResult

STRATEGIES = ("fedavg", "fedprox", "fedadam", "ffa", "rolora", "flexlora", "median", "trimmed_mean")


FIRST_VERSION = "r0"  # with B = 0, what a new adapter begins with
ACCUMULATION = 8  # micro-batches an optimiser step, where nobody says otherwise


class BadJob(ValueError):
    """A job's arguments or result do not fit its struct; names the field."""


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of an adapter: y += (lora_alpha / rank) B A x on the target modules."""

    rank: int = 8
    lora_alpha: float = 16.0
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")


class Privacy(msgspec.Struct, frozen=True, kw_only=True):
    """Local differential privacy of the uploaded delta: L2 clip, then Gaussian noise.

    The noise's standard deviation is ``noise_multiplier * clip`` for the whole delta.
    """

    clip: float
    noise_multiplier: float
    delta: float = 1e-5  # of (epsilon, delta)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A process group of one exchange; rank 0 is the server. Rendezvous in a Redis hash."""

    id: str
    rank: int
    members: tuple[str, ...]  # replica ids by rank
    backend: str = "gloo"  # "gloo" | "nccl"
    timeout: float = 20.0  # seconds for the rendezvous and for each collective


class InitialiseJob(msgspec.Struct, frozen=True, kw_only=True):
    """Write the first version of an adapter: A random from ``seed``, B zero."""

    adapter: str
    version: str
    lora: Lora
    seed: int = 0


class InitialiseResult(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    path: str


class PrepareJob(msgspec.Struct, frozen=True, kw_only=True):
    """Tokenise an adapter's data and attach a LoRA of its shape, as a round will want them."""

    adapter: str
    base: str
    lora: Lora
    max_tokens: int = 512
    heldout_fraction: float = 0.1
    seed: int = 0


class PrepareResult(msgspec.Struct, frozen=True, kw_only=True):
    examples: int  # to train on
    seconds: float


class RoundJob(msgspec.Struct, frozen=True, kw_only=True):
    """One client's local training of one round. Times in Redis seconds, lengths in tokens."""

    session: str
    round: int  # counts from 1
    client: str  # replica id
    adapter: str
    base: str  # served name of the base model
    parent: str  # version the round opens with
    parent_path: str
    lora: Lora
    train: tuple[str, ...] = ("A", "B")  # factors that are trained (ffa: B; rolora: in turn)
    prox_mu: float = 0.0  # FedProx: mu/2 ||w - w_parent||^2 is added to the loss
    steps: int = 50  # optimiser steps
    accumulation: int = ACCUMULATION  # micro-batches a step
    # Samples a micro-batch, one entry a step, cycled; 0 = leave the serving side alone for about
    # as long as a step takes, so that its latency without training is observed as well.
    micro_batches: tuple[int, ...] = (4,)
    learning_rate: float = 2e-4
    # Micro-batch that the learning rate is for; a larger one goes by its square root faster.
    # 0: the rate is for whatever batch there is.
    rate_batch: int = 0
    max_rounds: int = 20  # for the schedule
    max_tokens: int = 512  # a sample is cut to this
    heldout_fraction: float = 0.1
    heldout_samples: int = 0  # of a held-out loss; 0 = the replica's own limit
    heldout_before: float | None = None  # the parent's held-out loss here, where it is known
    # Held-out losses in mid-round take at most this part of the round's training; 0 = no bound.
    evaluate_share: float = 0.0
    judged: bool = False  # the aggregate is judged at once: no held-out loss of the local end
    publish: str = "on_improvement"  # "every_step" | "on_improvement" | "per_round"
    privacy: Privacy | None = None
    exchange: str = "redis"  # "redis" | "group"
    blob: str = ""  # id to upload under, with exchange "redis"
    deadline: float = 0.0  # stop training and hand over what there is by then; 0 = none
    seed: int = 0


class GradientNoise(msgspec.Struct, frozen=True, kw_only=True):
    """What the micro-gradients of ``count`` optimiser steps tell: means of |G|^2 and tr Sigma.

    Each may come out at or below 0 by chance; their quotient, the noise scale in samples, is
    worth something only over many steps.
    """

    gradient: float
    trace: float  # per sample
    count: int


class RoundResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a client reports. ``examples`` is its weight n_k: samples trained in the round.

    A client cut short by the deadline reports the steps it did; one without data reports 0
    examples and no update.
    """

    session: str
    round: int
    client: str
    base: str
    parent: str
    lora: Lora
    examples: int
    steps: int
    micro_steps: int = 0
    tokens: int = 0
    first_loss: float | None = None  # nats/token of the first step's samples before its update
    loss: float | None = None  # mean over the steps
    last_loss: float | None = None  # of the last step's samples
    heldout_before: float | None = None  # parent version, nats/token
    heldout_after: float | None = None  # locally trained adapter
    loss_reduction: float | None = None  # mean fall of the loss a step
    noise: GradientNoise | None = None
    started: float = 0.0  # Redis seconds: job began
    first_step: float = 0.0  # Redis seconds: first micro-step began
    seconds: float = 0.0  # of the whole job
    train_seconds: float = 0.0  # inside micro-steps
    wait_seconds: float = 0.0  # yielding to the serving side
    # Seconds of the job by stage: prepare, update (of the optimiser), rest, evaluate, publish,
    # save, hand_over. What they and the two above leave over is the job's own bookkeeping.
    parts: dict[str, float] = {}
    exchange_seconds: float = 0.0
    exchange_bytes: int = 0
    blob: str = ""  # where the update is, with exchange "redis"
    published: tuple[str, ...] = ()  # local versions served meanwhile


class SendJob(msgspec.Struct, frozen=True, kw_only=True):
    """Send the update kept from a round: to the group's rank 0, or as a blob (``group`` None)."""

    session: str
    round: int
    adapter: str
    group: Group | None = None
    blob: str = ""


class SendResult(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    bytes: int


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One client's update as the server gets it; with a group, ``blob`` is empty."""

    client: str
    round: int
    base: str
    parent: str
    examples: int
    lora: Lora
    blob: str = ""


class AggregateJob(msgspec.Struct, frozen=True, kw_only=True):
    """Aggregate the updates of a round on the server replica and write the new version.

    The strategy's server state lies beside the tensors of the version that it belongs to, so
    that a new server takes both from the parent's folder.
    """

    session: str
    round: int
    server: str
    adapter: str
    base: str
    parent: str
    parent_path: str
    version: str
    lora: Lora
    strategy: str = "fedavg"
    options: dict[str, float] = {}  # e.g. server_lr, beta1, beta2, tau, trim
    updates: tuple[Update, ...] = ()
    group: Group | None = None  # gather over the group instead of blobs


class AggregateResult(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    path: str
    used: tuple[str, ...]  # clients
    rejected: dict[str, str] = {}  # client -> reason
    aggregation_error: float | None = None
    exchange: str = "redis"  # the path that carried the tensors
    exchange_seconds: float = 0.0
    exchange_bytes: int = 0


class EvaluateJob(msgspec.Struct, frozen=True, kw_only=True):
    """Cross-entropy of versions on the held-out part of this replica's data for the adapter."""

    client: str
    adapter: str
    paths: tuple[str, ...]  # PEFT folders; "" = the base model alone
    heldout_fraction: float = 0.1
    max_tokens: int = 512
    max_samples: int = 32


class EvaluateResult(msgspec.Struct, frozen=True, kw_only=True):
    client: str
    ce: tuple[float | None, ...]  # nats per answer token, one a path; None: no held-out samples
    tokens: int


J = TypeVar("J", bound=msgspec.Struct)


def to_json(job: msgspec.Struct) -> dict[str, Any]:
    """The struct as JSON values: the one argument or the return value of an rq job."""
    plain = msgspec.to_builtins(job)
    assert isinstance(plain, dict)
    return plain


def from_json(plain: object, kind: type[J]) -> J:
    """Raises BadJob naming the field."""
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as e:
        raise BadJob(f"{kind.__name__}: {e}") from e
