"""A replica is kept free for what has waited long and fits none as they are."""

from __future__ import annotations

from services.dispatcher.policies.parts.placement import KEEP_AGE, KEEP_SECONDS
from services.dispatcher.policies.parts.waiting import LATE
from shared.latency import LatencyModel
from tests.dispatcher.scene import Scene, lane, why


def test_a_replica_is_kept_free_for_what_has_waited_long() -> None:
    """Small ones keep the memory full: the large one would never find room."""
    made = lane("a", model=LatencyModel(), kv_total=1000, b_limit=9)
    scene = Scene(made)
    scene.wait("large", latest=5.0, prompt_tokens=900)
    made.release(scene.wait("old", prompt_tokens=90), 0.0)
    scene.queues.remove(scene.queues.waiting["old"])
    scene.wait("small", latest=9.0)
    assert scene.serve(4.0) == {"a": ("small",)}, "it has not waited long enough"
    scene.wait("next", latest=9.0)
    assert scene.serve(5.1) == {}, "it has: nobody else comes in"
    for key in ("old", "small"):
        made.leave(key, 6.0, learn=False)
    (release,) = scene.releases(6.0)
    assert release.requests == ("large",)
    assert why(release, "large") == "waited long, a replica was kept free"
    made.leave("large", 7.0, learn=False)
    assert scene.serve(7.0) == {"a": ("next",)}


def test_replicas_are_kept_free_one_at_a_time_and_not_one_after_another() -> None:
    lanes = [lane(key, model=LatencyModel(), kv_total=1000, b_limit=9) for key in "ab"]
    scene = Scene(*lanes)
    for each in lanes:
        each.kv = 500
    for n in range(3):
        scene.wait(f"large{n}", latest=n / 10, prompt_tokens=900)
    scene.wait("small", latest=9.0)
    assert scene.serve(1.0) == {"b": ("small",)}
    for each in lanes:
        each.kv = 500
    lanes[0].kv = 0
    assert scene.serve(1.1) == {"a": ("large0",)}
    scene.wait("more", latest=9.0)
    assert sum(map(len, scene.serve(1.2).values())) == 1, "none is kept"
    scene.wait("other", latest=9.0)
    assert scene.serve(1.2 + KEEP_SECONDS) == {"b": ("other",)}, "a is kept again"


def test_a_replica_is_kept_no_longer_when_it_or_the_request_is_gone() -> None:
    for gone in ("request", "replica"):
        a, b = (lane(key, model=LatencyModel(), kv_total=1000, b_limit=9) for key in "ab")
        scene = Scene(a, b)
        a.kv, b.kv = 400, 500
        w = scene.wait("large", latest=0.0, prompt_tokens=900)
        assert scene.serve(1.0) == {}
        if gone == "request":
            scene.queues.remove(w)
            scene.wait("small")
            assert scene.serve(1.1) == {"a": ("small",)}
        else:
            scene.macro.order.remove(a)
            scene.wait("small")
            scene.serve(1.1)
            b.kv = 0
            assert "large" in {k for keys in scene.serve(1.2).values() for k in keys}


def test_a_hopeless_one_has_a_replica_kept_free_after_a_minute() -> None:
    made = lane("a", model=LatencyModel(), kv_total=1000, b_limit=9)
    scene = Scene(made)
    made.kv = 500
    scene.wait("large", LATE, latest=-1.0, prompt_tokens=900)
    assert scene.serve(KEEP_AGE - 1) == {}
    scene.wait("small", latest=999.0)
    assert scene.serve(KEEP_AGE) == {"a": ("small",)}
    assert scene.serve(KEEP_AGE + 1) == {}
    scene.wait("next", latest=999.0)
    assert scene.serve(KEEP_AGE + 2) == {}
    made.kv = 0
    (release,) = scene.releases(KEEP_AGE + 3)
    assert release.requests == ("large",)
