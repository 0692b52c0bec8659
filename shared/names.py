"""Every Redis name in one place: streams, keys, groups, consumer names.

Pure string functions; nothing here talks to Redis. Prefix ``collm:`` throughout, so that
``redis-cli --scan --pattern 'collm:*'`` shows the whole system.
"""

from __future__ import annotations

PREFIX = "collm:"

# Consumer groups: one a kind of reader.
GROUP_DISPATCHER = "dispatcher"
GROUP_REPLICA = "replica"
GROUP_COORDINATOR = "coordinator"

# Single keys.
METRICS = PREFIX + "metrics"
EVENTS = PREFIX + "events"
DEAD_LETTERS = PREFIX + "dead-letters"
DECISIONS = PREFIX + "decisions"  # stream: each release or refusal, for `collm why`
MODELS = PREFIX + "models"  # set of served model names
REPLICAS = PREFIX + "replicas"  # set of replica ids ever seen and not forgotten
GATEWAYS = PREFIX + "gateways"  # set of gateway ids whose reply stream may exist
ADAPTERS = PREFIX + "adapters"  # set of adapter names
COORDINATOR_CONTROL = PREFIX + "coordinator:control"


def requests(model: str) -> str:
    """Stream of requests for a base model, gateway -> dispatcher."""
    return f"{PREFIX}requests:{model}"


def dispatcher_control(model: str) -> str:
    """Stream of commands to the dispatcher of a model (cancel)."""
    return f"{PREFIX}dispatcher:{model}:control"


def batches(replica: str) -> str:
    """Stream of released batches, dispatcher -> replica."""
    return f"{PREFIX}replica:{replica}:batches"


def control(replica: str) -> str:
    """Stream of commands to a replica: cancel, configure, adapter load/unload, drain."""
    return f"{PREFIX}replica:{replica}:control"


def replies(gateway: str) -> str:
    """Stream of tokens and final events for one gateway process."""
    return f"{PREFIX}replies:{gateway}"


def gateway_alive(gateway: str) -> str:
    """Heartbeat key of a gateway; expires."""
    return f"{PREFIX}gateway:{gateway}:alive"


def model(name: str) -> str:
    """Hash: the card of a served base model."""
    return f"{PREFIX}model:{name}"


def replica(replica_id: str) -> str:
    """Hash: the record of a replica (see shared.records)."""
    return f"{PREFIX}replica:{replica_id}"


def replica_alive(replica_id: str) -> str:
    """Heartbeat key of a replica; its value is the incarnation; expires."""
    return f"{PREFIX}replica:{replica_id}:alive"


def replica_wanted(replica_id: str) -> str:
    """Key: a replica that was drained is wanted again; taken by the `collm up` that runs it."""
    return f"{PREFIX}replica:{replica_id}:wanted"


def adapter(name: str) -> str:
    """Hash: current version, quality, rank, base, creation time of an adapter."""
    return f"{PREFIX}adapter:{name}"


def adapter_versions(name: str) -> str:
    """Hash: version -> JSON of that version's entry (path, quality, parent, round)."""
    return f"{PREFIX}adapter:{name}:versions"


def blob(blob_id: str) -> str:
    """Bytes: tensors of an adapter (safetensors), chunked; expires."""
    return f"{PREFIX}blob:{blob_id}"


def train_queue(replica_id: str) -> str:
    """Name of the rq queue of a replica's training process (rq adds its own prefix)."""
    return f"train:{replica_id}"


def lease(role: str) -> str:
    """Lease of the active dispatcher, launcher or coordinator: the holder's id; expires."""
    return f"{PREFIX}lease:{role}"


def fence(role: str) -> str:
    """Counter of fencing tokens handed out for a lease; never expires."""
    return f"{PREFIX}fence:{role}"


def session(session_id: str) -> str:
    """Hash: a federated session's state, so that a restarted coordinator takes it up."""
    return f"{PREFIX}session:{session_id}"


def session_wishes(session_id: str) -> str:
    """Hash: what launcher, gateway or an operator want of a session; taken by the coordinator."""
    return f"{PREFIX}session:{session_id}:wishes"


SESSIONS = PREFIX + "sessions"  # set of session ids not yet ended


def group(group_id: str) -> str:
    """Hash: rendezvous of one exchange's process group; expires."""
    return f"{PREFIX}group:{group_id}"


def group_news(group_id: str) -> str:
    """Stream: a key of the rendezvous hash was set, so that waiting ranks wake up; expires."""
    return f"{PREFIX}group:{group_id}:news"


def demand(model_name: str) -> str:
    """Hash: what is asked of a base model, by the dispatcher (see shared.demand); expires."""
    return f"{PREFIX}demand:{model_name}"


FILES = PREFIX + "files"  # sorted set of uploaded file ids by time
JOBS = PREFIX + "jobs"  # sorted set of fine-tuning job ids by time
JOBS_CURSOR = PREFIX + "jobs:cursor"  # last entry of ``events`` that was entered into jobs


def file(file_id: str) -> str:
    """Hash: an uploaded file's record (see shared.jobs)."""
    return f"{PREFIX}file:{file_id}"


def job(job_id: str) -> str:
    """Hash: a fine-tuning job's record (see shared.jobs)."""
    return f"{PREFIX}job:{job_id}"


def job_events(job_id: str) -> str:
    """Stream: what happened to a job, for its owner."""
    return f"{PREFIX}job:{job_id}:events"


def job_seen(job_id: str) -> str:
    """Set: entry ids of ``events`` that a job's own events contain already; expires."""
    return f"{PREFIX}job:{job_id}:seen"


def jobs_of_adapter(adapter_name: str) -> str:
    """The id of the job that trains an adapter."""
    return f"{PREFIX}adapter:{adapter_name}:job"


def tenant_levels(tenant: str) -> str:
    """Hash: what is left of a tenant's requests and tokens a minute; expires."""
    return f"{PREFIX}tenant:{tenant}:levels"


def tenant_chat(tenant: str, request_id: str) -> str:
    """JSON: a recent chat of a tenant that wants to learn from feedback; expires."""
    return f"{PREFIX}tenant:{tenant}:chat:{request_id}"


def tenant_chats(tenant: str) -> str:
    """Sorted set: request ids of a tenant's recent chats by time; expires."""
    return f"{PREFIX}tenant:{tenant}:chats"


def tenant_learnt(tenant: str) -> str:
    """Hash: example made of a tenant's feedback -> bytes; field "" has their sum."""
    return f"{PREFIX}tenant:{tenant}:learnt"


def tenant_running(tenant: str) -> str:
    """Hash: gateway process -> a tenant's requests that run there, as of when; expires."""
    return f"{PREFIX}tenant:{tenant}:running"
