"""Merged or not, decided in each iteration: which requests of a simulated replica run, which pause.

As the emulated engine in its mode ``dynamic``, by the same rule (``services.replica.merging``).
Spans of many iterations only where they are exact: while no credit moves, that is, nobody is
displaced, and mode and guard are those of the iteration before, the decision can only change when
a request comes or goes. Else an iteration is a span, and so is one with prompts.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from services.replica import merging
from shared.profile import Profile
from sim.job import Job

if TYPE_CHECKING:
    from sim.replica import Replica


class Dynamic:
    """``steady``: until a request comes or goes, every further decision is the last one."""

    def __init__(self, profile: Profile) -> None:
        self._rule = merging.of(profile)
        self._switch = profile.merge_seconds
        self._paused: dict[str, Job] = {}  # their ``finish_at`` counts iterations from now
        self._came = 0
        self.steady = False

    @property
    def merged(self) -> bool:
        return self._rule.merged is not None

    def choose(self, replica: Replica, now: float) -> tuple[float, list[str | None]]:
        """Make the next iteration's batch: seconds of a switch, and whose adapters it needs."""
        queue = self._queue(replica)
        if not queue:
            return 0.0, []
        choice = self._rule.decide([job.request.adapter for job in queue], replica.b_limit)
        self.steady = choice.steady
        batch = {queue[place].request.id: queue[place] for place in choice.batch}
        self._pause(replica, batch)
        for job in batch.values():
            self._run(replica, job, now)
        replica.prefilling.sort(key=lambda job: job.order)
        adapters = list(dict.fromkeys(job.request.adapter for job in batch.values()))
        return self._switch if choice.switched else 0.0, adapters

    def repeated(self, times: int) -> None:
        """The last decision was carried out ``times`` more."""
        self._rule.repeated(times)

    def take_back(self, ids: set[str]) -> list[Job]:
        """Drop paused requests; their memory is the caller's to free."""
        return [self._paused.pop(request) for request in ids & self._paused.keys()]

    def _queue(self, replica: Replica) -> list[Job]:
        """What has begun, and what waits and has memory to begin, oldest first."""
        queue = [*replica.prefilling, *self._paused.values()]
        queue += [job for _, _, job in replica.decoding]
        free = replica.profile.kv_tokens - replica.kv_used
        for job in replica.waiting:
            free -= job.kv
            if free < 0:
                break
            if job.order < 0:
                self._came += 1
                job.order = self._came
            queue.append(job)
        return sorted(queue, key=lambda job: job.order)

    def _pause(self, replica: Replica, batch: dict[str, Job]) -> None:
        """Take out of the running ones those that are not in the batch."""
        stopped = [job for job in replica.prefilling if job.request.id not in batch]
        if stopped:
            replica.prefilling = [j for j in replica.prefilling if j.request.id in batch]
        decoding = [entry for entry in replica.decoding if entry[2].request.id in batch]
        if len(decoding) < len(replica.decoding):
            for finish_at, _, job in replica.decoding:
                if job.request.id not in batch:
                    job.finish_at = finish_at - replica.iteration
                    stopped.append(job)
            heapq.heapify(decoding)
            replica.decoding = decoding
        self._paused.update((job.request.id, job) for job in stopped)

    def _run(self, replica: Replica, job: Job, now: float) -> None:
        """Start or go on with a request of the batch that does not run yet."""
        if job.started < 0:
            replica.waiting.remove(job)
            replica.kv_used += job.kv
            job.started = now
            replica.prefilling.append(job)
        elif self._paused.pop(job.request.id, None) is None:
            return
        elif job.to_prefill > 0:
            replica.prefilling.append(job)
        else:
            job.finish_at += replica.iteration
            heapq.heappush(replica.decoding, (job.finish_at, -job.order, job))
