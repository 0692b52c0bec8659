"""The rounds of federated sessions: local training, aggregation, a new version, its quality.

The coordinator's own search chooses (B, b) of each client and round. What is simulated is only
the learning itself: a loss curve over the samples that the federation has trained on, weighted
by what one brings in batches of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from services.coordinator import search
from services.coordinator.goodput import Progress, goodput
from services.coordinator.search import Demand, Member
from services.launcher.terms import Options
from shared.quality import MIN_CE, after_round
from shared.replica_state import State
from shared.rounds import ACCUMULATION
from sim.events import aggregated, loaded, trained
from sim.training import Curve, Trainer

if TYPE_CHECKING:
    from sim.world import World


class Federated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How training is run; the switches take one part out each, for ablations."""

    launcher: Options = Options()
    B0: int = 4
    B_max: int = 16
    local_steps: int = 50
    max_rounds: int = 20
    samples: int = 1000  # training samples a replica holds
    noise_scale: float = 16.0  # gradient noise scale, in samples
    aggregate_seconds: float = 1.0  # exchange and aggregation of a round
    round_deadline: float = 600.0
    yielding: bool = True
    fixed: tuple[int, int] | None = None  # (B, b) of every client instead of the search
    training_off: bool = False  # B = 0 always
    dedicated: int = 0  # the last so many replicas only train (the isolated design)
    publish_at_end: bool = False  # a session's version is served only when it has ended
    solo: bool = False  # every client learns from its own samples only


class Session:
    """One federated session."""

    def __init__(self, clients: Sequence[str], number: int) -> None:
        self.id = f"session-{number}"
        self.clients = list(clients)
        self.round = 0
        self.open: set[str] = set()  # clients that have not ended this round
        self.losses: dict[str, list[float]] = {}
        self.progress: dict[str, Progress] = {}


class Rounds:
    """At most one session at a time. ``demand`` tells the load as the coordinator sees it."""

    def __init__(
        self, world: World, options: Federated, curve: Curve, demand: Callable[[], Demand]
    ) -> None:
        self._world, self._options, self._curve = world, options, curve
        self._demand = demand
        self.session: Session | None = None
        self.samples = 0.0  # what the newest version has learnt, in samples of the curve's runs
        self.ended = 0
        self.micro_steps = 0.0
        self.active_seconds = 0.0  # of training, over all replicas
        self.history: list[tuple[float, float]] = [(0.0, curve.cross_entropy(0.0))]
        self._sessions = 0
        self._served_samples = 0.0  # trained on by the version that is served
        self._looks: dict[str, int] = {}  # replica -> the look at it that counts
        self._limits = {name: replica.b_limit for name, replica in world.replicas.items()}
        if options.dedicated:
            self._load_copies()

    @property
    def _dedicated(self) -> list[str]:
        return list(self._world.replicas)[-self._options.dedicated :]

    def _load_copies(self) -> None:
        """The isolated design: training has its own copy of the base, loaded for each session."""
        world = self._world
        loads = [world.replicas[name].profile.load_seconds for name in self._dedicated]
        for name in self._dedicated:
            world.move(name, State.COMBINED)
        world.kernel.push(world.kernel.now + max(loads), loaded.handle, self)

    def copies_loaded(self) -> None:
        self.open(self._dedicated)

    @property
    def quality(self) -> float:
        """1 / cross-entropy of the version that is served."""
        return 1.0 / max(self._curve.cross_entropy(self._served_samples), MIN_CE)

    def member(self, name: str, demand: Demand) -> Member:
        """A replica as the search sees it."""
        replica, trainer = self._world.replicas[name], self._world.replicas[name].trainer
        session = self.session
        progress = None if session is None else session.progress.get(name)
        return Member(
            id=name,
            model=replica.latency,
            b_max=replica.profile.b_max,
            quality=self._world.quality[name],
            trains=trainer is not None,
            B=0 if trainer is None else trainer.B,
            progress=progress or Progress(noise_scale=self._options.noise_scale),
            B0=self._options.B0,
            B_max=self._options.B_max,
            suspended=trainer is not None and trainer.suspended,
        )

    def note_training(self) -> None:
        """Seconds in which trainers computed since the last tick, for the heat map."""
        world = self._world
        for replica in world.replicas.values():
            if replica.trainer is not None:
                replica.trainer.accrue(world.kernel.now)
                self._take_active(replica.row, replica.trainer)

    def _take_active(self, row: str, trainer: Trainer) -> None:
        self.active_seconds += trainer.active_seconds
        if trainer.active_seconds:
            self._world.recorder.training.add(row, self._world.kernel.now, trainer.active_seconds)
        trainer.active_seconds = 0.0

    def join(self, name: str) -> None:
        """A newly Idle replica takes part from the next round on."""
        if self.session is not None:
            self.session.clients.append(name)
            self._world.move(name, State.COMBINED)

    def open(self, clients: Sequence[str]) -> None:
        self._sessions += 1
        self.session = Session(clients, self._sessions)
        for name in clients:
            self._world.move(name, State.COMBINED)
        self._start_round(self.session)

    def _start_round(self, session: Session) -> None:
        world, o, now = self._world, self._options, self._world.kernel.now
        session.round += 1
        session.open = set(session.clients)
        choices, steps = self._choices(session), self._steps(session)
        for name in session.clients:
            B, b = choices[name]
            replica = world.replicas[name]
            trainer = Trainer(replica.latency, B, steps * ACCUMULATION, now, yielding=o.yielding)
            replica.trainer = trainer
            replica.b_limit = max(1, min(b, self._limits[name]))
            world.announce(name)
            self._await(name, session.round)
        world.kernel.push(now + o.round_deadline, aggregated.deadline, (self, session.round))

    def _steps(self, session: Session) -> int:
        """Optimiser steps of the round; few in the first one, if its batch sizes are guesses."""
        o = self._options
        guessed = session.round == 1 and o.fixed is None and not o.dedicated
        if not guessed:
            return o.local_steps
        return search.first_steps(o.local_steps, search.cycle(o.B0, o.B_max, rests=False))

    def _choices(self, session: Session) -> Mapping[str, tuple[int, int]]:
        """(B, b) of each client: small B0 in the first round, then the coordinator's search."""
        o, world = self._options, self._world
        if o.training_off:
            return {name: (0, world.replicas[name].profile.b_max) for name in session.clients}
        if o.dedicated:
            return {name: (self._best_alone(name), 1) for name in session.clients}
        if o.fixed is not None:
            return dict.fromkeys(session.clients, o.fixed)
        demand = self._demand()
        if session.round == 1:
            b = {n: search.b_star(self.member(n, demand), o.B0, demand) for n in session.clients}
            return {name: (o.B0, b[name]) for name in session.clients}
        members = []
        for name, state in world.states.items():
            if state in (State.SERVING, State.COMBINED):
                member = self.member(name, demand)
                trains = name in session.clients
                members.append(msgspec.structs.replace(member, trains=trains))
        return {name: (c.B, c.b) for name, c in search.search(members, demand).items()}

    def _best_alone(self, name: str) -> int:
        """The micro-batch that learns fastest on a replica that does not serve."""
        o, model = self._options, self._world.replicas[name].latency
        progress = Progress(noise_scale=o.noise_scale)
        return max(range(1, o.B_max + 1), key=lambda B: goodput(B, 0, model, progress, B0=o.B0))

    def _await(self, name: str, number: int) -> None:
        """Look again when the client can at the earliest be done with its round."""
        trainer = self._world.replicas[name].trainer
        if trainer is not None:
            wait = min(max(trainer.remaining(), 0.05), self._options.round_deadline)
            look = self._looks[name] = self._looks.get(name, 0) + 1
            self._world.kernel.push(
                self._world.kernel.now + wait, trained.handle, (self, name, number, look)
            )

    def resumed(self, name: str) -> None:
        """B = 0 is no longer asked of a client: its round goes on, and is looked at again."""
        session = self.session
        if session is not None and name in session.open:
            self._await(name, session.round)

    def client_progress(self, name: str, number: int, look: int) -> None:
        """Is the client done with round ``number``? An outdated look says nothing."""
        session, trainer = self.session, self._world.replicas[name].trainer
        if session is None or session.round != number or name not in session.open:
            return
        if look != self._looks[name]:
            return
        assert trainer is not None, "a client of an open round trains"
        trainer.accrue(self._world.kernel.now)
        if trainer.done < trainer.target - 1e-6:
            self._await(name, number)
            return
        session.open.discard(name)
        trainer.pause(self._world.kernel.now)
        if not session.open:
            self._world.kernel.push(
                self._world.kernel.now + self._options.aggregate_seconds,
                aggregated.handle,
                (self, number),
            )

    def deadline(self, number: int) -> None:
        """The round's time is up: aggregate what there is."""
        session = self.session
        if session is not None and session.round == number and session.open:
            session.open.clear()
            self.aggregate(number)

    def aggregate(self, number: int) -> None:
        """A new version is served everywhere; then the next round, or the end."""
        session, world, now = self.session, self._world, self._world.kernel.now
        if session is None or session.round != number:
            return
        before = self._curve.cross_entropy(self.samples)
        trained_on = 0.0
        for name in session.clients:
            trainer = world.replicas[name].trainer
            if trainer is not None:
                trainer.accrue(now)
                worth = self._curve.worth(ACCUMULATION * trainer.B, self._options.noise_scale)
                done = min(trainer.done, trainer.target)
                trained_on += done * trainer.B * worth
                self._take_active(world.replicas[name].row, trainer)
                self.micro_steps += done
        self.samples += trained_on / len(session.clients) if self._options.solo else trained_on
        after = self._curve.cross_entropy(self.samples)
        self.ended += 1
        self.history.append((now, after))
        self._judge(session, before, after)
        if not self._options.publish_at_end:
            self._served_samples = self.samples
        if session.round >= self._options.max_rounds or len(session.clients) < 2:
            self._close(session)
        else:
            self._start_round(session)

    def _judge(self, session: Session, before: float, after: float) -> None:
        """Q of the new version, losses and progress of the clients."""
        world = self._world
        for name, quality in world.quality.items():  # every replica serves the new version
            world.quality[name] = after_round(quality, before, after)
            world.announce(name)
        steps = max(1, self._steps(session))
        for name in session.clients:
            session.losses.setdefault(name, []).append(after)
            progress = session.progress.get(name, Progress(noise_scale=self._options.noise_scale))
            session.progress[name] = progress.updated((before - after) / steps)

    def leave(self, name: str) -> None:
        """A client serves again; the others go on without it."""
        session = self.session
        if session is None or name not in session.clients:
            return
        session.clients.remove(name)
        session.open.discard(name)
        self._release(name)
        if len(session.clients) < 2:
            self._close(session)
        elif not session.open:
            self.aggregate(session.round)

    def _close(self, session: Session) -> None:
        for name in session.clients:
            self._release(name)
        self.session = None
        self._served_samples = self.samples
        if self._options.dedicated and self._world.more_to_come:
            self._load_copies()

    def _release(self, name: str) -> None:
        replica = self._world.replicas[name]
        replica.trainer = None
        replica.b_limit = self._limits[name]
        self._world.move(name, State.SERVING)
