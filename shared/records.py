"""Records that lie in Redis hashes: a replica, a served model. Text fields, so that
``redis-cli HGETALL collm:replica:replica-0`` reads well.

Each field has one owner: the replica writes what it is and does, the state machine
(``shared.replica_state``) writes state/since/by/why, the coordinator writes the coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import orjson

from shared.latency import LatencyModel

HEARTBEAT_SECONDS = 0.5
HEARTBEAT_TTL_MS = 3000
SILENCE = HEARTBEAT_TTL_MS / 1e3 + 1.0  # seconds after which an older heartbeat has expired


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served base model, in ``model:<name>``; written by each replica when it starts."""

    name: str
    path: str  # folder with tokenizer.json, config.json, … (as the replica sees it)
    context: int  # tokens, prompt + output
    vocabulary: int
    engine: str = "torch"  # "torch" | "emulated"
    dtype: str = ""
    created: float = 0.0

    @property
    def emulated(self) -> bool:
        return self.engine == "emulated"

    def to_hash(self) -> dict[str, str]:
        return {k: str(v) for k, v in msgspec.to_builtins(self).items()}

    @classmethod
    def from_hash(cls, raw: Mapping[bytes, bytes]) -> ModelCard:
        return msgspec.convert(_text(raw), cls, strict=False)


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a replica, in ``replica:<id>``. Token counts, batch sizes, Redis seconds."""

    # written by the replica
    id: str = ""
    model: str = ""
    engine: str = "torch"
    incarnation: str = ""
    b: int = 0  # concurrency limit in force
    b_max: int = 1
    B: int = 0  # micro-batch in force
    in_flight: int = 0
    waiting: int = 0
    kv_free: int = 0
    kv_total: int = 0
    context: int = 0
    adapters: dict[str, str] = {}  # name -> version served to new requests
    data: dict[str, int] = {}  # adapter -> training samples held here
    trains: bool = True  # it was started with training switched on
    thread_slots: int = 1
    host: str = ""
    device: str = ""  # "cpu", "cuda:0"; "" = emulated, or not said yet
    gpu: str = ""  # UUID of that GPU, the same in every container; "" = none
    pid: int = 0
    started: float = 0.0
    progress: float = 0.0  # Redis time of the serving loop's last turn
    # written by the state machine
    state: str = ""
    since: float = 0.0
    by: str = ""
    why: str = ""
    # written by the coordinator
    coefficients: dict[str, float] = {}
    b_star: int = 0
    B_star: int = 0
    q: float = 1.0  # quality of the adapter versions it serves

    def latency(self) -> LatencyModel | None:
        """The coordinator's coefficients; None until there are any."""
        model = LatencyModel.__struct_fields__
        known = {k: v for k, v in self.coefficients.items() if k in model}
        return LatencyModel(**known) if known else None

    def to_hash(self, *fields: str) -> dict[str, str]:
        """The named fields (all when none is named) as text; mappings as JSON."""
        chosen = fields or self.__struct_fields__
        out = {}
        for name in chosen:
            value = getattr(self, name)
            plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
            out[name] = str(value) if plain else orjson.dumps(value).decode()
        return out

    @classmethod
    def from_hash(cls, raw: Mapping[bytes, bytes]) -> ReplicaRecord:
        """Raises msgspec.ValidationError or orjson.JSONDecodeError on a damaged record."""
        values: dict[str, object] = dict(_text(raw))
        for name in ("adapters", "data", "coefficients"):
            if name in values:
                values[name] = orjson.loads(str(values[name]))
        return msgspec.convert(values, cls, strict=False)


def _text(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in raw.items()}
