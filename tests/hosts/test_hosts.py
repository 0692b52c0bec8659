"""Gateway and Redis, dispatcher, and two replicas, each on a host of its own; cables are pulled."""

import pytest

from tests import tiny
from tests.hosts.cluster import MODEL, Cluster, until
from tests.hosts.network import Network, Unavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LONG = 400  # tokens of an answer that takes seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("model") / MODEL, seed=7)


@pytest.fixture(scope="module")
def network():
    try:
        made = Network("hub", "dispatch", "left", "right")
    except Unavailable as e:
        pytest.skip(f"no network namespaces here: {e}")
    with made:
        yield made


@pytest.fixture(scope="module")
def cluster(network, model, tmp_path_factory):
    running = Cluster(network, tmp_path_factory.mktemp("hosts"), model)
    running.start(("left", "right"))
    try:
        assert until(lambda: running.ask(2) is not None, 90), running.logs()
        assert until(lambda: _serving(running, "left", "right"), 60), running.logs()
        yield running
    finally:
        running.stop()


def _serving(cluster: Cluster, *replicas: str) -> bool:
    return all(cluster.state(r) == "serving" for r in replicas)


def _body(tokens: int) -> dict[str, object]:
    return {"model": MODEL, "prompt": [50, 51, 52], "max_tokens": tokens, "temperature": 0}


def test_an_answer_goes_on_elsewhere_when_its_host_is_cut_off_and_comes_back(cluster, network):
    right_text = cluster.ask(LONG)
    assert right_text
    for host in ("left", "right"):
        clients = [cluster.begin(_body(LONG)) for _ in range(4)]
        network.cut(host)
        try:
            answers = [cluster.finish(c) for c in clients]
            assert until(lambda h=host: cluster.state(h) == "dead", 15), cluster.logs()
        finally:
            network.heal(host)
        assert [status for status, _ in answers] == [200] * 4, answers
        assert {a["choices"][0]["text"] for _, a in answers} == {right_text}
        assert until(lambda h=host: cluster.state(h) == "serving", 60), cluster.logs()


def test_requests_wait_while_the_dispatcher_is_cut_off(cluster, network):
    right_text = cluster.ask(20)
    network.cut("dispatch")
    try:
        clients = [cluster.begin(_body(20)) for _ in range(3)]
        assert until(lambda: _serving(cluster, "left", "right"), 10)
    finally:
        network.heal("dispatch")
    answers = [cluster.finish(c) for c in clients]
    assert [(s, a["choices"][0]["text"]) for s, a in answers] == [(200, right_text)] * 3


def test_lost_packets_lose_no_request(cluster, network):
    right_text = cluster.ask(60)
    try:
        network.drop("left", 0.02)
        network.drop("dispatch", 0.02)
    except Unavailable as e:
        pytest.skip(str(e))
    answers = [cluster.finish(c) for c in [cluster.begin(_body(60)) for _ in range(6)]]
    assert [(s, a["choices"][0]["text"]) for s, a in answers] == [(200, right_text)] * 6


def test_a_slow_network_only_makes_answers_later(cluster, network):
    right_text = cluster.ask(20)
    try:
        network.delay("right", 40)
        network.delay("dispatch", 40)
    except Unavailable as e:
        pytest.skip(f"the kernel cannot delay packets: {e}")
    assert [cluster.ask(20) for _ in range(4)] == [right_text] * 4
