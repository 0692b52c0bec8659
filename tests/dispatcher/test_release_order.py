"""In which order requests leave the queues, and what becomes of hopeless ones."""

from __future__ import annotations

from services.dispatcher.policies.parts.choice import LANES_TRIED, LATE_PER_LANE
from services.dispatcher.policies.parts.placement import (
    LATE_AGE,
    LOOK_AHEAD,
    LOOKS_MAX,
)
from services.dispatcher.policies.parts.waiting import DEFERRED, LATE
from shared.latency import LatencyModel
from tests.dispatcher.scene import Scene, lane, occupy, why

# ------------------------------------------------------------ in which order


def test_requests_go_by_slack_and_what_fits_nowhere_is_passed_over() -> None:
    scene = Scene(lane("a", context=200), lane("b", context=200))
    for n in range(2):
        scene.wait(f"large{n}", latest=float(n), prompt_tokens=1000)
    scene.wait("second", latest=6.0)
    scene.wait("first", latest=5.0)
    first, second = scene.releases()
    assert (first.requests, second.requests) == (("first",), ("second",))
    assert why(first, "first") == "slack, 2 before it fit nowhere now"
    assert why(second, "second") == "slack, 2 before it fit nowhere now"
    assert sorted(item[3].request.id for item in scene.queues.main) == ["large0", "large1"]
    scene = Scene(lane("a"))
    scene.wait()
    assert [why(each) for each in scene.releases()] == ["slack"]


def test_only_so_many_are_passed_over() -> None:
    for large, served in ((LOOK_AHEAD, {"r": ("small",)}), (LOOK_AHEAD + 1, {})):
        scene = Scene(lane("r", context=200))
        for n in range(large):
            scene.wait(f"large{n}", latest=0.0, prompt_tokens=1000)
        scene.wait("small", latest=5.0)
        assert scene.serve() == served


def test_what_was_given_up_takes_what_is_left() -> None:
    scene = Scene(lane("a"), lane("b"), lane("c"))
    scene.wait("cheap", DEFERRED, cost=1.0)
    scene.wait("dear", DEFERRED, cost=0.1)
    scene.wait("main")
    found = scene.releases()
    assert [each.requests for each in found] == [("main",), ("dear",), ("cheap",)]
    assert [why(each, each.requests[0]) for each in found] == [
        "slack",
        "left over, tokens per second",
        "left over, tokens per second",
    ]


def test_under_overload_value_decides_but_what_waited_too_long_goes_first() -> None:
    scene = Scene(lane("a"), lane("b"), lane("c"))
    scene.wait("soon", latest=2.0, cost=1.0)
    scene.wait("dear", latest=5.0, cost=0.1)
    scene.wait("overdue", latest=0.5, cost=9.0)
    found = scene.releases(1.0, price=3.0)
    assert [each.requests for each in found] == [("overdue",), ("dear",), ("soon",)]
    assert [why(each, each.requests[0]) for each in found] == [
        "waited long",
        "tokens per second, overload",
        "tokens per second, overload",
    ]
    calm = Scene(lane("a"), lane("b"))
    calm.wait("soon", latest=2.0, cost=1.0)
    calm.wait("dear", latest=5.0, cost=0.1)
    assert [each.requests for each in calm.releases()] == [("soon",), ("dear",)]


def test_an_overdue_one_that_fits_nowhere_does_not_stop_the_others() -> None:
    scene = Scene(lane("a", context=200))
    scene.wait("overdue", latest=0.5, prompt_tokens=1000)
    scene.wait("dear", latest=5.0, cost=0.1)
    assert scene.serve(1.0, price=3.0) == {"a": ("dear",)}


def test_tenants_take_turns_by_the_tokens_they_have_had() -> None:
    free = LatencyModel()
    scene = Scene(lane("a", model=free, b_limit=4))
    for n in range(3):
        scene.wait(f"x{n}", latest=float(n), tenant="x")
    for n in range(2):
        scene.wait(f"y{n}", latest=5.0 + n, tenant="y")
    scene.shares.charge("x", 30, 0)
    (release,) = scene.releases()
    # 120 tokens each: y has 0, x 30
    assert release.requests == ("y0", "x0", "y1", "x1")
    assert why(release, "y0") == "least served tenant, tokens per second, overload"


def test_tenants_that_all_find_room_go_by_slack() -> None:
    free = LatencyModel()
    scene = Scene(lane("a", model=free, b_limit=4))
    for n, tenant in enumerate(("x", "x", "x", "y")):
        scene.wait(f"{tenant}{n}", latest=float(n), tenant=tenant)
    (release,) = scene.releases()
    assert release.requests == ("x0", "x1", "x2", "y3")
    assert why(release, "x0") == "slack"


def test_a_tenant_without_anything_that_fits_leaves_the_line() -> None:
    free = LatencyModel()
    scene = Scene(lane("a", model=free, b_limit=3, context=200))
    for n in range(3):
        scene.wait(f"x{n}", tenant="x", prompt_tokens=1000)
    for n in range(2):
        scene.wait(f"y{n}", tenant="y")
    assert scene.serve() == {"a": ("y0", "y1")}


def test_a_decision_looks_at_so_many_replicas_and_goes_on_at_once() -> None:
    free = LatencyModel()
    scene = Scene(*(lane(f"r{n:02}", model=free, b_limit=99) for n in range(LANES_TRIED)))
    for n in range(60):
        scene.wait(f"q{n:02}", latest=float(n))
    served = scene.serve(5.0)
    assert sum(map(len, served.values())) == LOOKS_MAX // LANES_TRIED
    assert scene.placement.wake == 5.0
    assert sum(map(len, scene.serve(5.0).values())) == LOOKS_MAX // LANES_TRIED


# ------------------------------------------------------------ hopeless requests


def test_hopeless_requests_go_last_and_oldest_first() -> None:
    scene = Scene(lane("a", model=LatencyModel()), lane("b", model=LatencyModel()))
    late = scene.wait("late", LATE, latest=-1.0)
    scene.wait("later", LATE, latest=-1.0)
    scene.wait("main")
    found = {key: each for each in scene.releases() for key in each.requests}
    assert found["main"].replica == "a"
    assert found["late"].replica == "b", "fewest in flight"
    assert why(found["late"], "late") == "hopeless, after all others"
    assert late.late
    assert scene.macro.background == {scene.macro.order[1], scene.macro.order[0]}


def test_they_are_left_where_they_are_refused() -> None:
    scene = Scene(lane("a"))
    scene.wait("late", LATE, latest=-1.0)
    assert scene.serve(late=False) == {}
    assert scene.serve() == {"a": ("late",)}


def test_so_many_hopeless_ones_share_a_replica() -> None:
    scene = Scene(*(lane(key, model=LatencyModel(), b_limit=9) for key in "ab"))
    scene.macro.rate.work, scene.macro.rate.mean = 0.5, 0.0  # not at rest, one to spare
    for n in range(LATE_PER_LANE + 2):
        scene.wait(f"q{n}", LATE, latest=-1.0)
    assert scene.serve() == {"a": ("q0", "q1")}
    assert scene.serve(0.1) == {}
    scene.macro.order[0].leave("q0", 0.2, learn=False)
    scene.macro.freed(scene.macro.order[0])
    assert scene.serve(0.3) == {"a": ("q2",)}


def test_at_rest_more_of_them_run_together() -> None:
    """Up to where an iteration takes twice as long as one request's, and half of the places."""
    slow = LatencyModel(alpha1=0.01, alpha0=0.03)
    for model, limit, wanted in (
        (slow, 99, 4),
        (slow, 6, 3),
        (LatencyModel(), 12, 6),
        (slow, 2, 2),
    ):
        scene = Scene(lane("a", model=model, b_limit=limit))
        for n in range(9):
            scene.wait(f"q{n}", LATE, latest=-1.0)
        served = sum(len(scene.serve(float(second)).get("a", ())) for second in range(9))
        assert served == wanted, (model, limit)


def test_a_request_in_time_ends_the_rest() -> None:
    scene = Scene(lane("a", model=LatencyModel(), b_limit=12))
    assert scene.macro.at_rest()
    scene.wait("now", latest=5.0)
    for n in range(9):
        scene.wait(f"q{n}", LATE, latest=-1.0)
    assert scene.serve() == {"a": ("now", "q0", "q1")}
    assert not scene.macro.at_rest()


def test_they_take_only_replicas_that_the_load_can_spare() -> None:
    free = LatencyModel()
    scene = Scene(*(lane(key, model=free, b_limit=9) for key in "abc"))
    scene.macro.rate.work, scene.macro.rate.mean = 1.5, 0.0  # 1.2 are left of 3
    for n in range(9):
        scene.wait(f"q{n}", LATE, latest=-1.0)
    assert scene.serve() == {"a": ("q0", "q1")}


def test_under_load_only_an_old_one_gets_a_replica() -> None:
    scene = Scene(lane("a", model=LatencyModel(), b_limit=9))
    scene.macro.rate.work = 5.0
    scene.wait("old", LATE, latest=-1.0, arrived=1.0)
    assert scene.serve(1.0 + LATE_AGE) == {}
    assert scene.serve(1.1 + LATE_AGE) == {"a": ("old",)}


def test_they_make_nobody_late_and_must_fit() -> None:
    made, tight = lane("a", context=200), lane("tight")
    occupy(tight)
    scene = Scene(made, tight)
    scene.placement.epsilon = 0.05
    tight.slack = 0.349
    scene.wait("late", LATE, latest=-1.0, prompt_tokens=100, max_tokens=150)
    assert scene.serve() == {}
    tight.slack = 0.351
    assert scene.serve() == {"tight": ("late",)}


def test_looks_are_bounded_for_them_too() -> None:
    free = LatencyModel()
    scene = Scene(*(lane(f"r{n:02}", model=free, b_limit=99) for n in range(LANES_TRIED)))
    for n in range(60):
        scene.wait(f"q{n:02}", LATE, latest=-1.0)
    assert sum(map(len, scene.serve().values())) == LOOKS_MAX // LANES_TRIED


def test_one_that_fits_nowhere_now_does_not_hold_up_the_hopeless_behind_it() -> None:
    made = lane("a", model=LatencyModel(), kv_total=1000)
    scene = Scene(made)
    scene.wait("large", LATE, latest=-1.0, prompt_tokens=900)
    scene.wait("small", LATE, latest=-1.0)
    made.kv = 500
    assert scene.serve() == {"a": ("small",)}
    made.kv = 0
    assert scene.serve() == {"a": ("large",)}, "it kept its place in the line"


def test_only_so_many_hopeless_ones_are_passed_over() -> None:
    for count, served in ((LOOK_AHEAD, {"a": ("small",)}), (LOOK_AHEAD + 1, {})):
        made = lane("a", model=LatencyModel(), kv_total=1000)
        scene = Scene(made)
        made.kv = 500
        for n in range(count):
            scene.wait(f"large{n}", LATE, latest=-1.0, prompt_tokens=900)
        scene.wait("small", LATE, latest=-1.0)
        assert scene.serve() == served


# ------------------------------------------------------------ tenants


def test_what_the_plan_gave_up_has_its_share_between_tenants() -> None:
    """All of y's is given up: it still has its turn before what x has besides."""
    free = LatencyModel()
    scene = Scene(lane("a", model=free, b_limit=3))
    for n in range(4):
        scene.wait(f"x{n}", latest=float(n), tenant="x")
    for n in range(2):
        scene.wait(f"y{n}", DEFERRED, latest=5.0 + n, tenant="y", cost=9.0)
    scene.shares.charge("x", 30, 0)
    (release,) = scene.releases(price=3.0)
    assert release.requests == ("y0", "x0", "y1")
    alone = Scene(lane("a", model=free, b_limit=3))
    for n in range(2):
        alone.wait(f"d{n}", DEFERRED, latest=5.0)
        alone.wait(f"m{n}", latest=6.0)
    (release,) = alone.releases(price=3.0)
    assert release.requests == ("m0", "m1", "d0"), "within a tenant the plan decides"


def test_hopeless_ones_go_by_the_tokens_of_their_tenants() -> None:
    scene = Scene(lane("a", model=LatencyModel(), b_limit=8))
    for n in range(4):
        scene.wait(f"x{n}", LATE, latest=-1.0, tenant="x")
    for n in range(2):
        scene.wait(f"y{n}", LATE, latest=-1.0, tenant="y")
    scene.shares.charge("x", 30, 0)
    (release,) = scene.releases()
    assert release.requests == ("y0", "x0", "y1", "x1")
