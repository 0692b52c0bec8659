"""Everything the gateway writes: requests and cancels, many in one round trip.

Whatever is handed in during one turn of the event loop, and while the previous round trip is
under way, goes out together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from services.gateway.answer import Choice
from services.gateway.errors import ApiError, overloaded, unavailable
from shared import names
from shared.control import send_command
from shared.demand import drain_seconds
from shared.entries import FIELDS, request_values
from shared.messages import Cancel, Generate
from shared.redis_client import TRANSIENT

log = logging.getLogger(__name__)

# Add requests to a model's stream as long as it holds fewer than ARGV[1]; the choices of one
# answer (ARGV[3] onwards: their number, then their fields) go in together or not at all.
# Returns for each answer 1 (added) or 0 (full).
_ADD = """
local room = tonumber(ARGV[1]) - redis.call('XLEN', KEYS[1])
local per, at, out = tonumber(ARGV[2]), 3, {}
while at <= #ARGV do
  local count = tonumber(ARGV[at])
  at = at + 1
  if count <= room then
    for i = 0, count - 1 do
      redis.call('XADD', KEYS[1], '*', unpack(ARGV, at + i * per, at + (i + 1) * per - 1))
    end
    room = room - count
    out[#out + 1] = 1
  else
    out[#out + 1] = 0
  end
  at = at + count * per
end
return out
"""
_UNLIMITED = str(1 << 52)
_PER_ENTRY = str(2 * len(FIELDS))

Argument = str | bytes
Attempt = tuple[str, int]  # request id, attempt
_Group = tuple[list[Choice], list[Argument]]  # an answer's choices, and what is sent of them


class Outbox:
    """Collects and sends. ``on_unknown`` is called when Redis went away during a round trip:
    nobody knows then what arrived. ``released`` tells how many requests a second leave a model's
    queue; ``retry_after`` (seconds) is named while that is not known."""

    def __init__(
        self,
        redis: Redis,
        *,
        queue_limit: int,
        retry_after: float,
        released: Callable[[str], float],
        on_refused: Callable[[], None],
        on_unknown: Callable[[], None],
    ) -> None:
        self._redis = redis
        self._limit, self._retry_after, self._released = queue_limit, retry_after, released
        self._on_refused, self._on_unknown = on_refused, on_unknown
        self._new: dict[str, list[_Group]] = {}  # model -> answers
        self._again: dict[str, list[Generate]] = {}  # model -> continuations
        self._cancels: list[tuple[str, str]] = []  # model, request id
        self._unsent_cancels: list[tuple[str, str]] = []  # Redis was away; safe to repeat
        self._unsent: set[Attempt] = set()  # in _new and _again
        self._going: set[Attempt] = set()  # in the round trip that is under way
        self._event = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, choices: list[Choice]) -> None:
        """Queue an answer's choices (all of one model).

        Encoded here, so that one that cannot be is its caller's error and nobody else's.
        """
        arguments: list[Argument] = [str(len(choices))]
        for choice in choices:
            arguments.extend(request_values(choice.request))
        self._unsent.update(_attempt(choice.request) for choice in choices)
        self._new.setdefault(choices[0].request.model, []).append((choices, arguments))
        self._wake()

    def resubmit(self, request: Generate) -> None:
        """Queue a continuation; the queue's limit does not hold for it."""
        self._unsent.add(_attempt(request))
        self._again.setdefault(request.model, []).append(request)
        self._wake()

    def cancel(self, request: Generate) -> None:
        self._cancels.append((request.model, request.id))
        self._wake()

    def redis_is_back(self) -> None:
        """Send the cancels that could not be sent."""
        if self._unsent_cancels:
            self._cancels.extend(self._unsent_cancels)
            self._unsent_cancels.clear()
            self._wake()

    def unsent(self) -> frozenset[Attempt]:
        """What is here still or on its way right now: in no stream yet, and not lost."""
        return frozenset(self._unsent | self._going)

    def _wake(self) -> None:
        self._idle.clear()
        self._event.set()

    async def flushed(self) -> None:
        """Until everything handed in so far is out."""
        await self._idle.wait()

    async def run(self) -> None:
        while True:
            if not (self._new or self._again or self._cancels):
                self._event.clear()
                self._idle.set()
            await self._event.wait()
            await self._flush()

    async def _flush(self) -> None:
        new, self._new = self._new, {}
        again, self._again = self._again, {}
        cancels, self._cancels = self._cancels, []
        self._going, self._unsent = self._unsent, set()
        pipe = self._redis.pipeline(transaction=False)
        for model, groups in new.items():
            arguments = [argument for _, own in groups for argument in own]
            pipe.eval(_ADD, 1, names.requests(model), str(self._limit), _PER_ENTRY, *arguments)
        for model, requests in again.items():
            pipe.eval(_ADD, 1, names.requests(model), *_continuations(requests))
        for model, request in cancels:
            send_command(pipe, names.dispatcher_control(model), Cancel(id=request), id=request)
        try:
            results = await pipe.execute(raise_on_error=False)
        except TRANSIENT as e:
            log.warning("Redis went away while requests were sent (%s)", type(e).__name__)
            self._unsent_cancels.extend(cancels)
            self._on_unknown()
            return
        finally:
            self._going = set()
        self._settle(new, results)

    def _settle(self, new: dict[str, list[_Group]], results: list[Any]) -> None:
        """Tell the answers that were refused; an error reply refuses a model's all."""
        for (model, groups), result in zip(new.items(), results, strict=False):
            if isinstance(result, Exception):
                for choices, _ in groups:
                    _fail(choices, self._refusal(result))
                continue
            for (choices, _), added in zip(groups, result, strict=True):
                if not added:
                    self._on_refused()
                    wait = drain_seconds(self._limit, self._released(model), self._retry_after)
                    _fail(choices, overloaded("the queue is full", wait))
        for result in results[len(new) :]:
            if isinstance(result, Exception):
                log.error("Redis refused a command: %s", result)
                self._on_unknown()

    def _refusal(self, error: Exception) -> ApiError:
        log.error("Redis refused requests: %s", error)
        if isinstance(error, OutOfMemoryError):
            return overloaded("Redis has no memory left", self._retry_after)
        if isinstance(error, TRANSIENT):  # loading its file
            return unavailable("Redis is starting", self._retry_after)
        return ApiError(500, "the request could not be queued", type="server_error")


def _attempt(request: Generate) -> Attempt:
    return request.id, request.attempt


def _continuations(requests: list[Generate]) -> list[Argument]:
    arguments: list[Argument] = [_UNLIMITED, _PER_ENTRY]
    for request in requests:
        arguments.append("1")
        arguments.extend(request_values(request))
    return arguments


def _fail(choices: list[Choice], error: ApiError) -> None:
    answer = choices[0].answer
    if answer is not None:
        answer.fail(error)
