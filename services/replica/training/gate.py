"""When training may compute: limits from outside, slack of serving, compute slots of the host.

Asked before each micro-step and at every layer inside it, so that training gives way within one
layer's time. Waiting is polling of shared memory, a few hundred nanoseconds a look.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch

from services.replica.control_block import ControlBlock
from services.replica.lane import ShortQueue
from services.replica.slots import Lease, Slots

log = logging.getLogger(__name__)

POLL = 0.001  # seconds between looks while waiting
TELL_AFTER = 10.0  # seconds of waiting after which the log says what for
SMOOTHING = 0.2
CPU = torch.device("cpu")
LOOK_EVERY = 0.002  # seconds between looks at the slots' files (a look is two system calls)


class Stopped(Exception):
    """The job was asked to stop. Ends the job; nothing is published any more."""


class DeadlinePassed(Exception):
    """The round's deadline is here: hand over what there is."""


class Gate(Protocol):
    """Says when training may compute. Both calls may block, and raise to end the job."""

    def before_micro_step(self, samples: int) -> float:
        """Wait until a micro-step of ``samples`` may begin; returns the seconds waited."""
        ...

    def inside(self) -> float:
        """Between layers: give way if serving needs it; returns the seconds waited."""
        ...

    def after_micro_step(self, seconds: float, samples: int, tokens: int) -> None:
        """Book a finished micro-step (waits excluded)."""
        ...

    def release(self) -> None:
        """Give the compute slots back without booking anything (an evaluation)."""
        ...

    def beside(self) -> int:
        """Requests that decode right now."""
        ...


class OpenGate:
    """Never waits: training alone."""

    def before_micro_step(self, samples: int) -> float:
        return 0.0

    def inside(self) -> float:
        return 0.0

    def after_micro_step(self, seconds: float, samples: int, tokens: int) -> None:
        return None

    def release(self) -> None:
        return None

    def beside(self) -> int:
        return 0


class ServingGate:
    """The ``Gate`` of a replica's training process.

    ``check`` is called at every look and raises to end the job. Holds compute slots only from
    ``before_micro_step`` to ``after_micro_step``.
    """

    def __init__(
        self,
        block: ControlBlock,
        slots: Slots,
        check: Callable[[], None],
        *,
        threads: int = 0,
        yielding: bool = True,
        layers: int = 1,
        device: torch.device = CPU,
    ) -> None:
        self._queue = ShortQueue(device)
        self._block, self._slots, self._check = block, slots, check
        self._wanted = min(threads or slots.count, slots.count)
        self._yielding = yielding
        self._looks = 2 * layers  # times that ``inside`` is called in a micro-step
        self._lease: Lease | None = None
        self._looked = self._counted = 0.0
        self.first_micro_step = 0.0  # CLOCK_MONOTONIC; 0 = none yet

    # ------------------------------------------------------------ Gate

    def before_micro_step(self, samples: int) -> float:
        """Wait for permission, slack and slots. Raises what ``check`` raises."""
        waited = self._wait()
        now = time.monotonic()
        self.first_micro_step = self.first_micro_step or now
        self._block.micro_started = now
        self._block.micro_samples = samples
        return waited

    def inside(self) -> float:
        """Give way if serving needs it, take more where it rests. Raises what ``check`` raises."""
        self._queue.passed()
        self._check()
        if self._lease is None:
            return 0.0
        if not self._must_give_way():
            self._widen()
            return 0.0
        block = self._block
        started, samples = block.micro_started, block.micro_samples
        self._give_back()
        waited = self._wait()
        block.micro_started, block.micro_samples = started + waited, samples
        return waited

    def after_micro_step(self, seconds: float, samples: int, tokens: int) -> None:
        self._give_back()
        block = self._block
        old = block.micro_estimate
        block.micro_estimate = seconds if old == 0 else old + SMOOTHING * (seconds - old)
        block.micro_steps += 1
        block.train_seconds += seconds
        block.train_tokens += tokens

    def release(self) -> None:
        self._give_back()

    def beside(self) -> int:
        return self._block.running

    # ------------------------------------------------------------ around a job

    def rest(self, seconds: float) -> None:
        """Leave serving alone for a while (a step of B = 0), so that its latency without
        training is seen; at most until it rests itself. Raises what ``check`` raises."""
        self._give_back()
        end = time.monotonic() + seconds
        self._check()
        while time.monotonic() < end and not self._serving_rests():
            self._check()
            time.sleep(POLL)

    # ------------------------------------------------------------ parts

    def _wait(self) -> float:
        """Until slots are held; returns the seconds it took."""
        self._give_back()  # a step that ended by an exception may have left some
        started = time.monotonic()
        told = False
        while not self._try_begin():
            self._check()
            waited = time.monotonic() - started
            if waited > TELL_AFTER and not told:
                log.info("training waits: %s", self._reason())
                told = True
            time.sleep(POLL)
        self._check()
        waited = time.monotonic() - started
        self._block.train_wait_seconds += waited
        return waited

    def _try_begin(self) -> bool:
        if not self._block.may_train() or not self._slack_suffices():
            return False
        alone = self._serving_rests()
        self._lease = self._slots.try_acquire_training(self._wanted, leave_first=not alone)
        if self._lease is None:
            return False
        self._counted = time.monotonic()
        if torch.get_num_threads() != self._lease.count:
            torch.set_num_threads(self._lease.count)
        return True

    def _must_give_way(self) -> bool:
        if not self._block.may_train():
            return True
        assert self._lease is not None
        if self._serving_rests():
            return self._others_wait()
        if self._lease.count > max(1, self._slots.count - 1):
            return True  # serving has begun to work: the first slot is its own
        return not self._slack_suffices() or self._others_wait()

    def _widen(self) -> None:
        """A micro-step that began beside serving takes the slots that rest now."""
        assert self._lease is not None
        missing = self._wanted - self._lease.count
        if missing <= 0 or not self._serving_rests():
            return
        more = self._slots.try_acquire_training(missing, leave_first=False)
        if more is not None:
            self._count()
            self._lease.join(more)
            torch.set_num_threads(self._lease.count)

    def _others_wait(self) -> bool:
        """Whether serving (of any replica of this host) stands without a slot."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY:
            return False
        self._looked = now
        return self._slots.inference_waits()

    def _serving_rests(self) -> bool:
        return self._block.running == 0 and self._block.waiting == 0

    def _slack_suffices(self) -> bool:
        """Whether serving can bear what happens until our next look: about a layer's time."""
        if not self._yielding or self._serving_rests():
            return True
        return self._block.has_slack(2 * self._block.micro_estimate / self._looks)

    def _reason(self) -> str:
        block = self._block
        if block.stopping:
            return "the replica drains"
        if block.B <= 0:
            return "B = 0: the coordinator (or a Configure command) lets it go on"
        if not self._slack_suffices():
            return f"serving has no slack ({block.slack:.3f} s, {block.running} requests run)"
        return f"no compute slot of {self._slots.count} is free"

    def _give_back(self) -> None:
        self._block.micro_started = 0.0
        self._block.micro_samples = 0
        if self._lease is not None:
            self._count()
            self._lease.release()
            self._lease = None

    def _count(self) -> None:
        """Add what the slots held have cost since the last count."""
        assert self._lease is not None
        now = time.monotonic()
        self._block.train_slot_seconds += self._lease.count * (now - self._counted)
        self._counted = now
