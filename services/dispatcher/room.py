"""Whether any replica of a model could ever serve a request: context and KV memory, in tokens."""

from __future__ import annotations

from collections.abc import Collection

from services.dispatcher.policies.base import ReplicaView, Request


def lacking(model: str, replicas: Collection[ReplicaView], request: Request) -> str | None:
    """Why none of the replicas could; None when one can, or while something is not known."""
    known = [v for v in replicas if v.context > 0 or v.kv_total > 0]
    if not known or len(known) < len(replicas):
        return None
    need = request.prompt_tokens + request.max_tokens
    room = max(min(v.context or need, v.kv_total or need) for v in known)
    if need <= room:
        return None
    return (
        f"{request.prompt_tokens} prompt tokens + max_tokens {request.max_tokens} need "
        f"{need} tokens; the replicas of {model!r} carry at most {room} a request"
    )
