"""The macro cycle: arrival rate, capacity of each replica, active set, promotion, B = 0.

Once a second and when a replica changed. Order and active set by Q times rate; the smallest
prefix that carries (1 + h) times the expected rate is active, the others are left idle so that
they can train.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.dispatcher.policies.base import Action, Promote, StepSeen
from services.dispatcher.policies.parts.lane import INFINITY, Lane
from services.dispatcher.policies.parts.line import Line
from services.dispatcher.policies.parts.rates import ArrivalRate
from services.dispatcher.policies.parts.reach import Reach
from services.dispatcher.policies.parts.rest import Rest
from services.dispatcher.policies.parts.waiting import Waiting
from shared.latency import LatencyModel

if TYPE_CHECKING:
    from services.dispatcher.policies.collm import Collm

CYCLE_SECONDS = 1.0
PROMOTE_SECONDS = 0.2  # between two promotions
SMOOTHING = 0.05
STANDING = 0.2  # relative change of Q times rate below which a replica keeps its place
REST_SHARE = 0.1  # of the replicas: a load that needs less leaves the cluster at rest
IDLE_SHARE = 0.5  # of the replicas without requests in time: hopeless ones may have them
DOUBT = 0.1  # share by which a request may be quicker than predicted
BETTER = 0.1  # share of its time that an Idle replica must have to spare to be worth a promotion
REFITS_MAX = 64  # replicas whose coefficients are fitted anew in one cycle


class Macro:
    """State of the macro cycle. ``active``: how many of ``order`` receive requests.

    Between two cycles nothing here looks at all replicas: what a decision needs of them is kept
    up to date by ``told``, ``gone``, ``engaged`` and ``freed``.
    """

    def __init__(self, headroom: float, *, consolidate: bool = True) -> None:
        self._headroom, self._consolidate = headroom, consolidate
        self.rate = ArrivalRate()
        self.typical: LatencyModel | None = None  # of a replica that does not train
        self.least_delay = 0.0  # seconds that any request at least takes from the others
        self.token_seconds = 0.0  # replica time of one output token at usual concurrency
        self.order: list[Lane] = []  # dispatchable, best first
        self.active = 0
        self.room = 0  # requests that all replicas take at once
        self.replicas_changed = True
        self.next_cycle = -INFINITY
        self._prompt, self._output, self._budget = 512.0, 128.0, INFINITY
        self._seen = 0
        self._b = 1.0
        self._promoted = -INFINITY
        self._rest = Rest()
        self._capacity = 0.0  # requests a second that all of ``order`` carry
        self.idle: dict[Lane, None] = {}  # may be promoted
        self.background: set[Lane] = set()  # with hopeless requests in flight
        self._taken: set[Lane] = set()  # with other than hopeless requests in flight
        self._engaged: dict[Lane, None] = {}  # perhaps with prompts that are not through
        self._kinds: dict[tuple[LatencyModel | None, int, int], int] = {}  # replicas run alike
        self._models_changed = False
        self._dispatchable: dict[Lane, None] = {}
        self.line = Line()
        self.reach = Reach()  # of the dispatchable replicas
        self._idle_reach = Reach()
        self._short = False  # requests were in need of a replica since the last cycle

    # ------------------------------------------------------------ what is seen

    def arrived(self, w: Waiting, *, hopeless: bool) -> None:
        self._seen += 1
        weight = max(0.01, 1.0 / self._seen)
        request = w.request
        self._prompt += weight * (request.prompt_tokens - self._prompt)
        self._output += weight * (w.output - self._output)
        if request.deadline is not None:
            budget = request.deadline - request.arrival
            self._budget = (
                budget
                if self._budget == INFINITY
                else self._budget + weight * (budget - self._budget)
            )
        self.rate.arrived(0.0 if hopeless else w.cost)

    def expired(self, count: int) -> None:
        """So many requests have become hopeless while they waited."""
        self._short = self._short or count > 0

    def saw(self, step: StepSeen) -> None:
        if step.decode_tokens:
            self._b += SMOOTHING * (step.decode_tokens / max(1, step.steps) - self._b)

    # ------------------------------------------------------------ the cycle

    def cycle(self, policy: Collm, now: float) -> list[Action]:
        if now < self.next_cycle and not self.replicas_changed and not policy.fit.grown():
            return []
        if now >= self.next_cycle:
            self.rate.tick(now)
            self.next_cycle = now + CYCLE_SECONDS
            self._refit(policy)
        elif policy.fit.grown():
            self._refit(policy)
        self.replicas_changed = False
        self._choose_typical(policy)
        need = (1 + self._headroom) * self.rate.expected
        self._rank(need)
        self.reach.renew(self.order)
        self._idle_reach.renew(self.idle)
        training = tuple(lane.view.id for lane in self.order if lane.view.training)
        late, self._short = self._short, False
        return self._rest.ask(training, late=late, capacity=self._capacity, need=need, now=now)

    def _rank(self, need: float) -> None:
        """Order of the replicas, and how many of them carry ``need`` requests a second.

        The noise of fitted coefficients moves nobody, nor does a change of prompts that all feel:
        a batch is steady only where the order is.
        """
        rates = {number: self._rate_of(*kind) for kind, number in self._kinds.items()}
        usual = sum(rates[x.kind] for x in self._dispatchable) / max(1, len(self._dispatchable))
        for lane in self._dispatchable:
            value = lane.quality * rates[lane.kind] / usual
            if abs(value - lane.standing) > STANDING * lane.standing:
                lane.standing = value
        keys = [(-x.standing, x.view.id, x) for x in self._dispatchable]
        keys.sort()  # hardly any work: the last cycle's order is nearly this one's
        self.order = lanes = [lane for _, _, lane in keys]
        self._dispatchable = dict.fromkeys(lanes)
        total, self.active, self.room = 0.0, 0, 0
        for rank, lane in enumerate(lanes):
            lane.rank = rank
            self.room += lane.view.b_limit
            if total < need or not (rank and self._consolidate) or lane.latency is None:
                self.active = rank + 1
                total += rates[lane.kind]
        self._capacity = sum(rates[lane.kind] for lane in lanes)
        self.line.renew(lanes, self.active)

    def told(self, lane: Lane) -> None:
        """A replica is new, or its record or coefficients have changed."""
        self.replicas_changed = self._models_changed = True
        kind = (lane.latency, lane.B, lane.view.b_limit)
        lane.kind = self._kinds.setdefault(kind, len(self._kinds))
        _keep(self._dispatchable, lane, lane.view.dispatchable)
        _keep(self.idle, lane, lane.view.idle)
        self.line.told(lane)

    def gone(self, lane: Lane) -> None:
        """A replica died or stopped."""
        self.replicas_changed = self._models_changed = True
        for books in (self._dispatchable, self.idle, self._engaged):
            books.pop(lane, None)
        self.line.gone(lane)
        self.background.discard(lane)
        self._taken.discard(lane)

    def _refit(self, policy: Collm) -> None:
        """Coefficients of replicas for which the coordinator has none yet."""
        if len(self._kinds) > 2 * len(policy.lanes) + REFITS_MAX:
            self._kinds.clear()
            for lane in policy.lanes.values():
                self.told(lane)
        for replica in policy.fit.changed(REFITS_MAX):
            known = policy.lanes.get(replica)
            if known is not None and known.view.latency is None:
                known.tell(known.view, policy.fit.model(replica))
                self.told(known)
        pooled = policy.fit.pooled()
        if pooled is None:
            return
        for lane in policy.lanes.values():
            if lane.latency is None:
                lane.tell(lane.view, pooled)
                self.told(lane)

    def _choose_typical(self, policy: Collm) -> None:
        if self._models_changed:
            self._models_changed = False
            models = [lane.latency for lane in policy.lanes.values() if lane.latency is not None]
            if models:
                self.typical = _mean(models)
                self.least_delay = self.typical.pi0 * 0.5
        if self.typical is not None:
            concurrency = max(1.0, self._b)
            self.token_seconds = self.typical.alpha1 + self.typical.alpha0 / concurrency

    def _rate_of(self, model: LatencyModel | None, B: int, b_limit: int) -> float:
        """Requests a second of a replica at b*; 1 while nothing is known of it."""
        if model is None:
            return 1.0
        budget = self._budget
        b = model.b_star(budget, B, self._prompt, self._output, b_max=b_limit, slo=budget)
        return min(1e6, model.rate(max(1, b), B, self._prompt, self._output))

    def promote(self, policy: Collm, now: float) -> list[Action]:
        """An Idle replica back to Serving: none serves, or those that do are not enough.

        Or none of them holds a request that an Idle one would.
        """
        if now - self._promoted < PROMOTE_SECONDS or not self.idle:
            return []
        need_tokens = policy.smallest_apart()
        fitting = [x for x in self.idle if need_tokens is not None and x.size >= need_tokens]
        capacity = self._capacity
        need = (1 + self._headroom) * self.rate.expected
        if self.order and capacity >= need and not self._short and not fitting:
            return []
        self._promoted = now
        best = max(fitting or self.idle, key=lambda lane: (lane.view.quality, lane.view.id))
        why: dict[str, float | str] = {
            "expected_rate": round(self.rate.expected, 3),
            "capacity": round(capacity, 3),
            "queued": policy.queued(),
        }
        if fitting and need_tokens is not None:
            why["holds_tokens"] = need_tokens  # no serving replica does
        return [Promote(replica=best.view.id, why=why)]

    # ------------------------------------------------------------ for the micro cycle

    def hopeless(self, w: Waiting, now: float) -> bool:
        """Whether not even an empty replica would keep its limits now, in all likelihood."""
        if self.reach.keeps(w, now, -DOUBT):
            return False
        if self.idle and self._idle_reach.keeps(w, now, BETTER):
            self.expired(1)  # an Idle one could: those to come shall have it
        return True

    def engaged(self, lane: Lane) -> None:
        """A request was released to a replica."""
        self._engaged[lane] = None
        if lane.background:
            self.background.add(lane)
        if len(lane.flight) > lane.background:
            self._taken.add(lane)

    def freed(self, lane: Lane) -> None:
        """A replica has credit again."""
        if lane.view.dispatchable:
            self.line.freed(lane, inside=lane.rank < self.active)
        if not lane.background:
            self.background.discard(lane)
        if len(lane.flight) <= lane.background:
            self._taken.discard(lane)

    def promised(self, now: float) -> float:
        """Replica seconds of prompts that are released and not through yet."""
        through = [lane for lane in self._engaged if lane.prefill_end <= now]
        for lane in through:
            del self._engaged[lane]
        return sum(x.prefill_end - now for x in self._engaged if x.view.dispatchable)

    def spare(self) -> int:
        """Replicas that the load with SLOs leaves over: by its rate, or because they are idle.

        The rate expects a burst to go on for seconds; a share of the idle ones is ready for that.
        """
        needed = self.rate.work * self.rate.margin * (1 + self._headroom)
        idle = IDLE_SHARE * (len(self.order) - len(self._taken))
        return max(0, int(len(self.order) - needed), int(idle))

    def at_rest(self) -> bool:
        """Whether nothing in time is in flight and next to nothing is expected."""
        needed = self.rate.work * self.rate.margin
        return not self._taken and needed <= REST_SHARE * len(self.order)

    def backlog_seconds(self, waiting: float, now: float) -> float:
        """Time until ``waiting`` replica seconds of work are done at the present capacity."""
        return (waiting + self.promised(now)) / max(1, len(self.order))


def _keep(books: dict[Lane, None], lane: Lane, wanted: bool) -> None:
    if wanted:
        books[lane] = None
    else:
        books.pop(lane, None)


def _mean(models: list[LatencyModel]) -> LatencyModel:
    n = len(models)
    return LatencyModel(
        alpha0=sum(m.alpha0 for m in models) / n,
        alpha1=sum(m.alpha1 for m in models) / n,
        pi0=sum(m.pi0 for m in models) / n,
        pi1=sum(m.pi1 for m in models) / n,
    )
