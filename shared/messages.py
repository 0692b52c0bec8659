"""Every message that crosses a process boundary, with its one codec.

Frozen, typed, tagged, versioned; on the wire plain msgpack, validated on decoding. Entries of
a Redis stream carry what a person wants to read in ``redis-cli XRANGE`` as plain text fields
and the whole message in one field, ``body``. Never pickle.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from shared.slo import Slo

VERSION = 1
BODY = b"body"


class DecodeError(ValueError):
    """Bytes that are no valid message. Carries them, so that they can go to dead-letters."""

    def __init__(self, reason: str, raw: bytes) -> None:
        super().__init__(f"cannot decode message: {reason}")
        self.reason = reason
        self.raw = raw


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", omit_defaults=True):
    """Base of all messages. ``v`` is the version of the contract that wrote it."""

    v: int = VERSION


# ---------------------------------------------------------------- requests


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a sequence ends. Lengths in tokens."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # the model's end tokens are already in here
    ignore_eos: bool = False  # then stop_token_ids holds only what the user named
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best
    grammar: str | None = None  # JSON schema that constrains the text, as a string


class Generate(Message, frozen=True, kw_only=True, tag="generate", omit_defaults=True):
    """One sequence to generate. A call with n = 3 is three of these."""

    id: str  # unique; "<x-request-id>.<choice>"
    gateway: str
    model: str  # served name of the base model
    adapter: str | None = None
    adapter_version: str | None = None  # pinned: a continuation stays on its version
    tenant: str = ""
    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()  # tokens already delivered by an earlier attempt
    sampling: Sampling
    slo: Slo = Slo()
    arrival: float  # Redis seconds
    deadline: float | None = None  # Redis seconds; from the SLO's end-to-end limit
    attempt: int = 1
    priority: int = 0  # higher goes first within its SLO class
    traceparent: str = ""  # W3C; "" = the request is not traced


class Batch(Message, frozen=True, kw_only=True, tag="batch", omit_defaults=True):
    """A released batch: encoded ``Generate`` bodies, untouched since the gateway wrote them."""

    id: str
    released: float  # Redis seconds
    queued: tuple[float, ...]  # when the dispatcher read each member
    requests: tuple[bytes, ...]


# ---------------------------------------------------------------- replies


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one token (nats)."""

    token: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token's log probability and the best alternatives, best first."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one engine step brought for one request.

    ``offset`` is the index of ``tokens[0]`` among all output tokens of the answer (those of
    earlier attempts included), so that a reader can drop what it has seen already.
    """

    id: str
    attempt: int
    offset: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str | None = None  # "stop" | "length" | "cancelled"
    adapter_version: str | None = None
    stamps: dict[str, float] = msgspec.field(default_factory=dict)  # with the final output
    cached_tokens: int = 0  # prompt tokens whose KV was reused


class StepReply(Message, frozen=True, kw_only=True, tag="step", omit_defaults=True):
    """One engine step's outputs for one gateway."""

    replica: str
    outputs: tuple[Output, ...]


class Failed(Message, frozen=True, kw_only=True, tag="failed", omit_defaults=True):
    """A request ended without (the rest of) an answer. ``status`` is the HTTP status to give."""

    id: str
    attempt: int
    status: int
    code: str | None
    message: str
    type: str = "server_error"
    param: str | None = None
    retry_after: float | None = None


class Lost(Message, frozen=True, kw_only=True, tag="lost", omit_defaults=True):
    """The replica that held the request has it no more; its gateway decides how to go on."""

    id: str
    attempt: int
    replica: str
    preempted: bool = False  # taken back by the policy; False: the replica died


Reply = StepReply | Failed | Lost

# ---------------------------------------------------------------- commands


class Cancel(Message, frozen=True, kw_only=True, tag="cancel", omit_defaults=True):
    """Forget a request: its client is gone or a stop string was met."""

    id: str


class Configure(Message, frozen=True, kw_only=True, tag="configure", omit_defaults=True):
    """Limits of a Combined or Serving replica; None leaves a value as it is."""

    b: int | None = None  # concurrency limit
    B: int | None = None  # training micro-batch, 0 = paused


class LoadAdapter(Message, frozen=True, kw_only=True, tag="load_adapter", omit_defaults=True):
    """Take an adapter version from disk (PEFT folder) and serve it at the next step."""

    name: str
    version: str
    path: str
    reply_to: str = ""  # event correlation id; "" = nobody waits


class UnloadAdapter(Message, frozen=True, kw_only=True, tag="unload_adapter", omit_defaults=True):
    """Stop accepting requests for an adapter; running ones finish."""

    name: str
    reply_to: str = ""


class StoreData(Message, frozen=True, kw_only=True, tag="store_data", omit_defaults=True):
    """Keep a training file for an adapter on this replica and nowhere else."""

    adapter: str
    file: str  # id of the file; storing it again replaces it
    blob: str  # where its bytes are
    suffix: str = ".jsonl"
    heldout: bool = False  # never trained on: versions are judged by it
    reply_to: str = ""


class DeleteData(Message, frozen=True, kw_only=True, tag="delete_data", omit_defaults=True):
    """Delete a training file here; "" deletes all of the adapter's."""

    adapter: str
    file: str = ""
    reply_to: str = ""


class Drain(Message, frozen=True, kw_only=True, tag="drain", omit_defaults=True):
    """Finish what runs, accept nothing more, stop."""

    reason: str = ""


class SuspendTraining(
    Message, frozen=True, kw_only=True, tag="suspend_training", omit_defaults=True
):
    """Dispatcher -> coordinator: load needs B = 0 on these replicas, or no longer."""

    replicas: tuple[str, ...]
    wanted: bool


Command = (
    Cancel
    | Configure
    | LoadAdapter
    | UnloadAdapter
    | StoreData
    | DeleteData
    | Drain
    | SuspendTraining
)

# ---------------------------------------------------------------- metrics


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A request that left the engine in this step."""

    id: str
    attempt: int
    prompt_tokens: int
    output_tokens: int
    reason: str  # finish reason, or "failed"
    started: float = 0.0  # Redis seconds; 0: never
    first_token: float = 0.0


class StepSample(Message, frozen=True, kw_only=True, tag="step_sample", omit_defaults=True):
    """One inference step (or several merged ones) of a replica, for the latency models.

    ``seq`` counts the samples of an incarnation without gaps: a reader that misses one knows
    that it must compare its books with the replica's stream.
    """

    replica: str
    model: str
    incarnation: str
    seq: int
    time: float  # Redis seconds
    seconds: float  # duration of the step
    steps: int = 1  # engine steps merged into this sample
    b: int  # requests decoding together
    B: int = 0  # micro-batch of training running beside it
    prefill_tokens: int = 0
    decode_tokens: int = 0
    waiting: int = 0  # requests in the replica without KV memory yet
    kv_used: int = 0  # tokens
    kv_total: int = 0
    finished: tuple[Finished, ...] = ()
    emulated: bool = False


class TrainSample(Message, frozen=True, kw_only=True, tag="train_sample", omit_defaults=True):
    """One optimiser step (or the end of a round) of a replica's training process."""

    replica: str
    adapter: str
    time: float
    round: int
    step: int
    B: int
    b: int  # requests decoding beside it, mean over the micro-steps
    micro_seconds: float  # mean duration of a micro-step, waits of yielding excluded
    wait_seconds: float = 0.0
    tokens: int = 0
    loss: float | None = None
    loss_reduction: float | None = None
    noise_scale: float | None = None  # in samples
    heldout_ce: float | None = None  # nats per token
    version: str | None = None


class UtilSample(Message, frozen=True, kw_only=True, tag="util_sample", omit_defaults=True):
    """Serving-only utilisation of a replica over the last launcher tick, 0 to 1."""

    replica: str
    time: float
    utilisation: float
    queued: int
    b: float
    source: str  # "step_share" | "sm_util" | "utilization.gpu"


Metric = StepSample | TrainSample | UtilSample

Any_ = Generate | Batch | Reply | Command | Metric

M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Any_)


def encode(message: Message) -> bytes:
    """One message as msgpack."""
    return _encoder.encode(message)


def decode(raw: bytes, kind: type[M]) -> M:
    """The message in ``raw``, which must be of class ``kind``.

    Raises DecodeError on anything else: not msgpack, wrong shape, another tag, another version.
    """
    message = decode_any(raw)
    if not isinstance(message, kind):
        raise DecodeError(f"{kind.__name__} expected, {type(message).__name__} found", raw)
    return message


def decode_any(raw: bytes) -> Message:
    """The message in ``raw``, of whatever class its tag names. Raises DecodeError."""
    try:
        message = _decoder.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as e:
        raise DecodeError(str(e), raw) from e
    if message.v != VERSION:
        raise DecodeError(f"contract version {message.v}, this process speaks {VERSION}", raw)
    assert isinstance(message, Message)
    return message
