"""What holds for every policy, whatever happens: found by hypothesis, checked by the driver."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from services.dispatcher.policies.base import Completion, Release, ReplicaView, Request
from services.dispatcher.policies.collm import FCFS_HORIZON, Collm
from services.dispatcher.policies.registry import POLICIES, UnknownPolicy, create
from shared.latency import LatencyModel
from tests.dispatcher.driver import Driver

LATENCY = LatencyModel(alpha0=0.004, alpha1=1e-4, pi0=0.001, pi1=1e-4)
THIRD = LatencyModel(alpha0=0.018, alpha1=0.002, pi0=0.05, pi1=5e-4)  # 0.3 s: 100 and 10 tokens
SERVING = [name for name in POLICIES if name != "split"]

arrival = st.floats(0.0, 3.0)


@st.composite
def requests(draw: st.DrawFn, *, slo: bool | None = None) -> list[Request]:
    """Up to 25 requests of two SLO classes, or none."""
    out = []
    for number in range(draw(st.integers(1, 25))):
        at = draw(arrival)
        limit = draw(st.sampled_from([None, 0.5, 5.0])) if slo is None else 5.0 if slo else None
        out.append(
            Request(
                id=f"q{number}",
                arrival=at,
                prompt_tokens=draw(st.integers(1, 4000)),
                max_tokens=draw(st.integers(1, 200)),
                tenant=draw(st.sampled_from(["", "a", "b"])),
                adapter=draw(st.sampled_from([None, "x", "y"])),
                deadline=None if limit is None else at + limit,
            )
        )
    return out


@st.composite
def fleets(draw: st.DrawFn) -> list[ReplicaView]:
    """One to four replicas; the first one serves, the others are in any state."""
    out = []
    for number in range(draw(st.integers(1, 4))):
        state = "serving" if number == 0 else draw(st.sampled_from(["serving", "idle", "none"]))
        out.append(
            ReplicaView(
                id=f"r{number}",
                dispatchable=state == "serving",
                idle=state == "idle",
                b_limit=draw(st.integers(1, 6)),
                b_max=8,
                quality=draw(st.sampled_from([0.5, 1.0, 2.0])),
                latency=draw(st.sampled_from([None, LATENCY])),
            )
        )
    return out


quick = settings(
    max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("name", SERVING)
@quick
@given(work=requests(), fleet=fleets(), seconds=st.floats(0.01, 1.0))
def test_every_request_is_released_once_or_refused_and_credit_is_bounded(
    name: str, work: list[Request], fleet: list[ReplicaView], seconds: float
) -> None:
    """No starvation either: when arrivals stop, nothing is left waiting."""
    driver = Driver(create(name), seconds)
    for view in fleet:
        driver.at(0.0, view)
    for request in work:
        driver.at(request.arrival, request)
    driver.run()
    assert not driver.waiting, f"left waiting: {driver.waiting}"
    assert driver.policy.queued() == 0
    ended = {key.rstrip("+") for key in driver.ended}
    assert ended | set(driver.shed) == {r.id for r in work}


@pytest.mark.parametrize("name", SERVING)
@quick
@given(work=requests(), fleet=fleets(), dies=st.floats(0.1, 4.0))
def test_what_a_dead_replica_had_is_served_by_the_others(
    name: str, work: list[Request], fleet: list[ReplicaView], dies: float
) -> None:
    driver = Driver(create(name), 0.3)
    for view in [*fleet, ReplicaView(id="spare", dispatchable=True, b_limit=4, latency=LATENCY)]:
        driver.at(0.0, view)
    driver.at(dies, "r0")
    for request in work:
        driver.at(request.arrival, request)
    driver.run()
    assert not driver.waiting


@quick
@given(
    work=requests(),
    count=st.integers(1, 5),
    serving=st.integers(0, 4),
    others=st.sampled_from(["serving", "idle", "combined"]),
)
def test_split_serves_on_its_own_part_only_and_leaves_nothing_waiting(
    work: list[Request], count: int, serving: int, others: str
) -> None:
    """The other replicas are left to train, whatever state they are in: the driver would refuse
    a release to one that takes nothing, here also one to a replica that would take it."""
    driver = Driver(create("split", serving=serving), 0.3)
    part = min(count, serving or max(1, count - 1))
    for number in range(count):
        state = "serving" if number < part else others
        view = ReplicaView(
            id=f"r{number}", dispatchable=state != "idle", idle=state == "idle",
            training=state == "combined", b_limit=3, latency=LATENCY,
        )  # fmt: skip
        driver.at(0.0, view)
    for request in work:
        driver.at(request.arrival, request)
    driver.run()
    assert not driver.waiting
    assert sorted(key for _, r in driver.releases for key in r.requests) == sorted(
        r.id for r in work
    )
    assert {r.replica for _, r in driver.releases} <= {f"r{number}" for number in range(part)}


@quick
@given(work=requests(slo=True), fleet=fleets())
def test_collm_goes_by_slack_within_a_class_unless_it_records_a_reason(
    work: list[Request], fleet: list[ReplicaView]
) -> None:
    driver = Driver(Collm(), 0.3)
    for view in fleet:
        driver.at(0.0, view)
    for request in work:
        driver.at(request.arrival, request)
    driver.run()
    released = [
        (now, key, now + float(r.why[f"slack:{key}"]), r.why[f"order:{key}"])
        for now, r in driver.releases
        for key in r.requests
    ]
    for (now, key, latest, why), (later, other, other_latest, other_why) in itertools.permutations(
        released, 2
    ):
        if str(other_why).startswith("hopeless"):
            continue  # its slack was used up while it waited; that is its recorded reason
        if why == "slack" and later > now and driver.requests[other].arrival <= now:
            assert other_latest >= latest - 1e-3, f"{other} had less slack than {key}"


@st.composite
def moves(draw: st.DrawFn) -> list[tuple[float, int, str]]:
    """Times at which a replica (by number) begins to serve, to idle or to train beside."""
    state = st.sampled_from(["serving", "idle", "combined"])
    return draw(st.lists(st.tuples(arrival, st.integers(0, 3), state), max_size=20))


@pytest.mark.parametrize("name", POLICIES)
@quick
@given(work=requests(), fleet=fleets(), changes=moves(), seconds=st.floats(0.01, 1.0))
def test_whatever_states_replicas_go_through_requests_go_to_those_that_take_them(
    name: str,
    work: list[Request],
    fleet: list[ReplicaView],
    changes: list[tuple[float, int, str]],
    seconds: float,
) -> None:
    """The driver refuses a release to any other; in the end all serve and nothing is left."""
    driver = Driver(create(name), seconds)
    for view in fleet:
        driver.at(0.0, view)
    for at, number, state in changes:
        driver.move(at, f"r{number % len(fleet)}", state)
    for request in work:
        driver.at(request.arrival, request)
    for view in fleet:
        driver.move(4.0, view.id, "serving")
    driver.run()
    assert not driver.waiting
    ended = {key.rstrip("+") for key in driver.ended}
    assert ended | set(driver.shed) == {r.id for r in work}


def _serve(policy: Collm, work: list[Request], *, b_limit: int = 1, seconds: float = 0.3) -> Driver:
    driver = Driver(policy, seconds)
    driver.at(0.0, ReplicaView(id="r", dispatchable=True, b_limit=b_limit, latency=LATENCY))
    for request in work:
        driver.at(request.arrival, request)
    driver.run()
    return driver


def _request(key: str, arrival: float, limit: float | None, **more: object) -> Request:
    values = {"prompt_tokens": 100, "max_tokens": 10, **more}
    deadline = None if limit is None else arrival + limit
    return Request(id=key, arrival=arrival, deadline=deadline, **values)  # type: ignore[arg-type]


def test_what_could_only_be_answered_without_the_way_back_gives_way_to_the_others() -> None:
    """A burst comes 0.2 s late; 0.2 s is what the answers need, too."""
    late = [
        Request(id=f"q{n}", arrival=0.0, prompt_tokens=100, max_tokens=10, deadline=limit)
        for n, limit in enumerate((0.3, 0.8))
    ]
    policy = Collm()
    policy.on_replica(ReplicaView(id="r", dispatchable=True, b_limit=1, latency=LATENCY), 0.0)
    policy.decide(0.0)
    for request in late:
        policy.on_arrival(request, 0.2)
    (release,) = (a for a in policy.decide(0.2) if isinstance(a, Release))
    assert release.requests == ("q1",)
    assert release.why["underway:q1"] == 0.2


def test_the_tighter_deadline_goes_first() -> None:
    work = [_request("first", 0.0, 9.0), _request("loose", 0.01, 8.0), _request("tight", 0.02, 2.0)]
    driver = _serve(Collm(), work)
    assert driver.order_of("tight") < driver.order_of("loose")


def test_a_higher_priority_goes_first_within_its_class() -> None:
    work = [_request("first", 0.0, 5.0)]
    work += [_request("low", 0.01, 5.0), _request("high", 0.02, 5.0, priority=1)]
    driver = _serve(Collm(), work)
    assert driver.order_of("high") < driver.order_of("low")


def test_a_hopeless_request_waits_for_the_others_or_is_refused() -> None:
    work = [_request("first", 0.0, 9.0), _request("hopeless", 0.01, 0.02)]
    work += [_request("fine", 0.02, 3.0)]
    driver = _serve(Collm(), work)
    assert driver.order_of("fine") < driver.order_of("hopeless")
    assert sorted(driver.ended) == ["fine", "first", "hopeless"], "late answers are delivered"


def test_nothing_is_refused_on_an_estimate_before_enough_outputs_are_known() -> None:
    work = [_request("first", 0.0, 9.0), _request("hopeless", 0.01, 0.02)]
    driver = _serve(Collm(on_overload="shed"), work)
    assert driver.shed == []
    assert sorted(driver.ended) == ["first", "hopeless"], "nor is anything left waiting"
    learned = Collm(on_overload="shed")
    many = [_request(f"q{k}", 0.35 * k, 9.0) for k in range(60)]
    driver = _serve(learned, [*many, _request("hopeless", 30.0, 0.02)])
    assert driver.shed == ["hopeless"]


@pytest.mark.parametrize("prompt", [100, 4000])
def test_no_request_without_a_slo_starves_behind_those_with_one(prompt: int) -> None:
    """Twice as many come as can be served, all worth more than the patient one's long prompt."""
    policy = Collm()
    driver = Driver(policy, 0.3)
    driver.at(0.0, ReplicaView(id="r", dispatchable=True, b_limit=1, latency=THIRD))
    for k in range(800):
        request = _request(f"q{k}", 0.15 * k, 5.0)
        driver.at(request.arrival, request)
    driver.at(20.0, _request("patient", 20.0, None, prompt_tokens=prompt))
    driver.run()
    (released,) = (now for now, r in driver.releases if "patient" in r.requests)
    assert 20.0 < released < 20.0 + FCFS_HORIZON + 1.0, "it has waited in the line of those in time"


def test_a_tenant_that_floods_the_queue_leaves_the_others_their_share() -> None:
    flood = [_request(f"a{k}", 0.001 * k, None, tenant="a") for k in range(200)]
    few = [_request(f"b{k}", 0.5 + 0.001 * k, None, tenant="b") for k in range(10)]
    driver = _serve(Collm(), [*flood, *few], b_limit=2)
    last = max(driver.order_of(f"b{k}") for k in range(10))
    assert last < 60, "the ten come out among the first ones after their arrival"


def test_a_flood_of_dense_requests_leaves_the_others_their_share() -> None:
    """Both have limits. All that b asks for has long prompts: the plan gives it up first."""
    policy = Collm()
    driver = Driver(policy, 0.3)
    driver.at(0.0, ReplicaView(id="r", dispatchable=True, b_limit=1, latency=THIRD))
    for k in range(400):
        driver.at(0.05 * k, _request(f"a{k}", 0.05 * k, 3.0, tenant="a"))
    for k in range(40):
        at = 1.0 + 0.5 * k
        driver.at(at, _request(f"b{k}", at, 3.0, tenant="b", prompt_tokens=400))
    driver.run()
    in_time = [
        key
        for at, r in driver.releases
        for key in r.requests
        if at + 0.3 <= (driver.requests[key].deadline or 0.0)
    ]
    assert len(in_time) > 50
    tokens = {t: sum(k.startswith(t) for k in in_time) * w for t, w in (("a", 116), ("b", 416))}
    assert tokens["b"] > 0.5 * tokens["a"], "at equal shares both have about as many tokens"


def test_a_tenant_of_long_answers_gets_no_more_tokens_than_one_of_short_ones() -> None:
    """One stream, one prediction: that an answer has a hundred times more shows at its end."""
    policy = Collm()
    policy.on_replica(ReplicaView(id="r", dispatchable=True, b_limit=1, latency=THIRD), 0.0)
    served = {"a": 0, "b": 0}
    tokens = {"a": 2000, "b": 20}
    for number in range(900):
        for tenant in served:
            made = _request(f"{tenant}{number}", 0.0, None, tenant=tenant, max_tokens=4000)
            policy.on_arrival(made, 0.0)
    now = 0.0
    for _ in range(600):
        now += 1.0
        (release,) = (a for a in policy.decide(now) if isinstance(a, Release))
        (key,) = release.requests
        served[key[0]] += 100 + 2 * tokens[key[0]]  # as the shares weigh prompt and answer
        end = Completion(id=key, replica="r", output_tokens=tokens[key[0]], reason="stop")
        policy.on_completion(end, now + 0.5)
    assert served["b"] == pytest.approx(served["a"], rel=0.1)


def test_an_unknown_policy_or_option_is_named_with_what_there_is() -> None:
    with pytest.raises(UnknownPolicy, match="least_loaded"):
        create("nonsense")
    with pytest.raises(UnknownPolicy, match="colour"):
        create("collm", colour="red")
