"""Which requests this replica answers for, and which batch entries they came in.

Pure bookkeeping: no Redis, no engine, no clock of its own.
"""

from __future__ import annotations

from services.replica.solo_pace import Mark
from shared.messages import Generate, Output


class Member:
    """A request between its submission to the engine and its last token."""

    __slots__ = ("delivered", "entry", "first_token", "mark", "queued", "released", "request")

    def __init__(self, request: Generate, entry: bytes, queued: float, released: float) -> None:
        self.request = request
        self.entry = entry
        self.queued, self.released = queued, released
        self.delivered = len(request.generated)
        self.first_token: float | None = None
        self.mark: Mark | None = None  # at the first token

    def note(self, output: Output, now: float) -> None:
        """Take in tokens that came at ``now``."""
        if output.tokens:
            if self.first_token is None:
                self.first_token = now
            self.delivered = output.offset + len(output.tokens)


class Books:
    """Members by request id, and the open members of each batch entry."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._open: dict[bytes, int] = {}

    def expect(self, entry: bytes, members: int) -> None:
        """A batch entry with this many members has been read."""
        self._open[entry] = members

    def add(self, member: Member) -> None:
        self.members[member.request.id] = member

    def remove(self, request_id: str) -> Member | None:
        """A member has left the engine; its entry is settled by ``settle``."""
        return self.members.pop(request_id, None)

    def settle(self, entry: bytes) -> bool:
        """One member of the entry is done for; True when it was the last one."""
        left = self._open.get(entry)
        if left is None:
            return False
        if left > 1:
            self._open[entry] = left - 1
            return False
        del self._open[entry]
        return True

    def clear(self) -> None:
        self.members.clear()
        self._open.clear()

    @property
    def empty(self) -> bool:
        return not self._open
