"""What was read from a replica's streams, and what to do with bytes that are no message."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.dead_letters import FIELD
from shared.messages import BODY, DecodeError, Failed, Message, decode_any


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a batch or control stream."""

    stream: bytes
    entry: bytes
    fields: dict[bytes, bytes]
    is_batch: bool

    @property
    def body(self) -> bytes:
        """The message's bytes. Raises DecodeError when the entry has none."""
        try:
            return self.fields[BODY]
        except KeyError:
            raise DecodeError("the entry has no field 'body'", b"") from None

    def command(self) -> Message:
        """The control message. Raises DecodeError."""
        return decode_any(self.body)

    def letter(
        self, reason: str, by: str, *, body: bytes | None = None
    ) -> dict[bytes | str, bytes | str]:
        """Fields for dead-letters: the entry as it was, or one member of its batch."""
        kept = self.fields if body is None else {BODY: body}
        letter: dict[bytes | str, bytes | str] = {
            "stream": self.stream,
            "entry": self.entry,
            "reason": reason,
            "by": by,
        }
        letter.update({FIELD + name: value for name, value in kept.items()})
        return letter


def poisoned(raw: bytes, reason: str) -> tuple[str, Failed] | None:
    """Gateway and answer for a request that does not decode, if it still says whose it is."""
    try:
        content: Any = msgspec.msgpack.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    request_id, gateway, attempt = (content.get(k) for k in ("id", "gateway", "attempt"))
    if not isinstance(request_id, str) or not isinstance(gateway, str) or not gateway:
        return None
    failed = Failed(
        id=request_id,
        attempt=attempt if isinstance(attempt, int) else 1,
        status=500,
        code=None,
        message=f"the request reached the replica damaged: {reason}",
    )
    return gateway, failed
