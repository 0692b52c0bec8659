"""What is given up under overload, and at which price."""

from __future__ import annotations

from services.dispatcher.policies.parts.plan import (
    PLANNED_MAX,
    REPLAN_MAX,
    REPLAN_SECONDS,
    Plan,
    keep_feasible,
)
from services.dispatcher.policies.parts.waiting import DEFERRED, GONE, LATE, MAIN, Waiting
from tests.dispatcher.made import request
from tests.dispatcher.scene import MODEL, Scene, lane


def planned(*rows: tuple[float, float, float]) -> list[tuple[float, float, int, Waiting]]:
    """Requests of (latest, cost, output), in order of latest."""
    out = []
    for number, (latest, cost, output) in enumerate(rows):
        w = Waiting(request(f"q{number}", deadline=99.0), output, cost, latest, 0.0)
        w.place = MAIN
        out.append((latest, 0.0, number, w))
    return out


def names(found: list[Waiting]) -> list[str]:
    return sorted(w.request.id for w in found)


def test_all_are_kept_that_can_start_in_time_one_after_another() -> None:
    rows = planned((0.0, 1.0, 10.0), (1.0, 1.0, 10.0), (2.0, 1.0, 10.0))
    kept, dropped = keep_feasible(rows, 0.0, 0.0, 1)
    assert (names(kept), names(dropped)) == (["q0", "q1", "q2"], [])
    kept, dropped = keep_feasible(rows, 0.5, 0.0, 1)
    assert len(dropped) == 1, "half a second later one is too much"
    kept, dropped = keep_feasible(rows, 0.0, 0.5, 1)
    assert len(dropped) == 1, "so it is with half a second promised"
    kept, dropped = keep_feasible(rows, 0.5, 0.5, 3)
    assert names(dropped) == ["q0"], "three are not quicker for what must have begun"
    assert keep_feasible([], 0.0, 0.0, 1) == ([], [])


def test_the_cheapest_of_those_so_far_is_given_up_even_if_it_came_earlier() -> None:
    rows = planned((0.0, 1.0, 50.0), (1.0, 1.0, 10.0), (1.5, 1.0, 90.0), (9.0, 1.0, 1.0))
    kept, dropped = keep_feasible(rows, 0.0, 0.0, 1)
    assert names(dropped) == ["q1"]
    assert names(kept) == ["q0", "q2", "q3"], "the last has time enough"
    assert [w.request.id for w in keep_feasible(rows, 0.0, 1.2, 1)[1]] == ["q0", "q1"]


def test_one_that_is_given_up_itself_ends_the_search_for_it() -> None:
    rows = planned((0.0, 1.0, 50.0), (0.5, 1.0, 10.0))
    kept, dropped = keep_feasible(rows, 0.0, 0.0, 1)
    assert (names(kept), names(dropped)) == (["q0"], ["q1"])


def test_only_those_that_wait_and_have_least_slack_are_planned() -> None:
    rows = planned(*((float(n), 0.0, 10.0) for n in range(PLANNED_MAX + 50)))
    for item in rows[:10]:
        item[3].place = LATE
    kept, dropped = keep_feasible(rows, 0.0, 0.0, 1)
    assert dropped == []
    assert {w.latest for w in kept} == {float(n) for n in range(10, PLANNED_MAX + 10)}
    rows[20][3].place = DEFERRED
    assert rows[20][3] in keep_feasible(rows, 0.0, 0.0, 1)[0]


def test_stale_entries_do_not_keep_the_plan_from_an_end() -> None:
    rows = planned(*((float(n), 0.0, 10.0) for n in range(3 * PLANNED_MAX)))
    for item in rows[: 2 * PLANNED_MAX]:
        item[3].place = GONE
    assert keep_feasible(rows, 0.0, 0.0, 1) == ([], [])


def test_the_price_is_the_value_of_the_best_that_is_given_up() -> None:
    scene = Scene(lane("a"))
    scene.macro.typical = MODEL
    plan = Plan(scene.queues, scene.macro)
    assert plan.price == 0.0
    first = scene.wait("q0", latest=0.0, cost=1.0, output=50.0, deadline=9.0)
    second = scene.wait("q1", latest=0.5, cost=1.0, output=10.0, deadline=9.0)
    third = scene.wait("q2", latest=0.6, cost=1.0, output=20.0, deadline=9.0)
    plan.renew(0.0)
    assert plan.price == 0.0, "nothing has changed"
    plan.changed = True
    plan.renew(0.0)
    assert plan.price == 20.0
    assert [w.place for w in (first, second, third)] == [MAIN, DEFERRED, DEFERRED]
    assert not plan.changed
    scene.queues.remove(first)
    plan.changed = True
    plan.renew(REPLAN_SECONDS / 2)
    assert plan.price == 20.0, "a plan holds for a while"
    plan.renew(REPLAN_SECONDS)
    assert plan.price == 10.0
    assert [w.place for w in (second, third)] == [DEFERRED, MAIN]
    scene.queues.remove(second)
    plan.changed = True
    plan.renew(1.0)
    assert plan.price == 0.0, "what is alone can begin at once"


def test_a_plan_holds_a_fiftieth_of_the_least_slack_and_half_a_second_at_most() -> None:
    for latest, holds in ((10.0, 0.2), (99.0, REPLAN_MAX), (0.1, REPLAN_SECONDS), (-5.0, 0.01)):
        scene = Scene(lane("a"))
        plan = Plan(scene.queues, scene.macro)
        scene.wait(latest=latest, deadline=99.0)
        plan.changed = True
        plan.renew(0.0)
        plan.changed = True
        plan.renew(holds - 1e-6)
        assert plan.changed
        plan.renew(holds + 1e-6)
        assert not plan.changed


def test_without_a_latency_model_or_a_replica_nothing_is_given_up() -> None:
    scene = Scene(lane("a"))
    plan = Plan(scene.queues, scene.macro)
    w = scene.wait(latest=-1.0, deadline=9.0)
    plan.changed = True
    plan.renew(0.0)
    assert (w.place, plan.price) == (MAIN, 0.0)
    scene.macro.typical, scene.macro.order = MODEL, []
    plan.changed = True
    plan.renew(1.0)
    assert (w.place, plan.price) == (MAIN, 0.0)


def test_prompts_that_are_promised_count_as_work() -> None:
    made = lane("a")
    scene = Scene(made)
    scene.macro.typical = MODEL
    plan = Plan(scene.queues, scene.macro)
    w = scene.wait(latest=1.0, deadline=9.0)
    made.prefill_end = 1.5
    scene.macro.engaged(made)
    plan.changed = True
    plan.renew(0.0)
    assert w.place == DEFERRED
