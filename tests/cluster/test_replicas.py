"""A router, the real HAProxy, goes on when replicas leave, fail or come. The replicas are fakes."""

import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from hplm_client.errors import Draining
from tests.cluster.front import INFER, read_answer
from tests.cluster.router import BIG, NAMES, fake_servers, routing
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("routers", [1, 4])
def test_a_replica_gets_no_more_requests_than_triton_bears_whatever_is_away(tmp_path, routers):
    with fake_servers(3) as replicas, routing(tmp_path, replicas, "--routers", str(routers)) as router:
        for one in replicas[:2]:
            one.stop()
        router.until_up(but=("replica-1", "replica-2"))
        replicas[2].hold()
        most = 256 // routers
        names = [*NAMES, *NAMES][: most + 40]
        with ThreadPoolExecutor(len(names)) as clients:
            asked = [clients.submit(router.ask, name, way="header") for name in names]
            eventually(lambda: sum(one.done() for one in asked) == len(names) - most)  # those that wait for too long
            assert replicas[2].tenants.total() == most
            replicas[2].release()
            assert Counter(one.result().status for one in asked) == {200: most, 503: len(names) - most}


def test_what_a_replica_refuses_is_passed_on_and_not_asked_again(router, replicas):
    for one in replicas:
        one.refusal = "[quota] retry after 1 s"
    before = sum(one.tenants.total() for one in replicas)
    answer = router.ask(NAMES[0])
    assert (answer.status, answer.error) == (503, "[quota] retry after 1 s")
    assert sum(one.tenants.total() for one in replicas) == before + 1
    router.until_up()


STOPPING = "[draining] the server is being stopped"


@pytest.mark.parametrize("way", ["json", "header", "binary"])
def test_what_a_draining_replica_refuses_another_one_answers(router, replicas, way):
    name = NAMES[0]
    home = next(one for one in replicas if one.name == router.replica_of(name))
    sizes = [router.ask(name, way=way, size=size).json["bytes"] for size in (1, 40_000)]
    home.refusal = STOPPING
    answers = [router.ask(name, way=way, size=size) for size in (1, 40_000)]
    assert home.name not in {one.replica for one in answers} and [one.json["bytes"] for one in answers] == sizes
    home.refusal = ""
    assert router.replica_of(name) == home.name


def test_a_request_that_arrives_in_pieces_is_sent_on_as_a_whole(router, replicas):
    name = NAMES[0]
    home = next(one for one in replicas if one.name == router.replica_of(name))
    home.refusal, before = STOPPING, home.tenants.total()
    with router.connect() as connection:
        head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nhplm-tenant: {name}\r\nContent-Length: 9\r\n\r\n"
        connection.sendall(head.encode() + b"piece")
        eventually(lambda: "fe=router" in router.socket.ask("show sess"))
        connection.sendall(b" two")
        answer = read_answer(connection)
    assert answer.replica != home.name and answer.json["bytes"] == 9 and home.tenants.total() == before + 1


@pytest.mark.parametrize(("way", "size", "tries"), [("header", 1, 2), ("header", 100_000, 1), ("metadata", 1, 1)])
def test_if_all_replicas_drain_the_client_hears_it_after_two_tries_at_most(router, replicas, way, size, tries):
    """HAProxy holds up to 64 KB of a request, to send it again. It cannot read gRPC's status in time."""
    for one in replicas:
        one.refusal = STOPPING
    before = sum(one.tenants.total() for one in replicas)
    answer = router.ask(NAMES[0], way=way, size=size)
    assert isinstance(answer.refused, Draining) and answer.status in (503, "StatusCode.UNAVAILABLE")
    assert STOPPING in answer.error and sum(one.tenants.total() for one in replicas) == before + tries


def test_another_501_stays_one(router, replicas):
    for one in replicas:
        one.refusal, one.status = "HTTP end point doesn't support models with decoupled transaction policy", 501
    assert router.ask(NAMES[0]).status == 501


def test_a_killed_replica_is_routed_round_and_comes_back(router, replicas):
    gone = replicas[0]
    homes = {name: router.replica_of(name) for name in NAMES}
    own = [name for name in NAMES if homes[name] == gone.name]
    gone.hold()
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(router.ask, own[0])
        eventually(lambda: gone.count)
        gone.stop()
        assert asked.result().status == 502, "what it had is answered, and not sent to another one"
    gone.release()
    try:
        for name in own[:3]:
            assert router.ask(name).replica != gone.name, "a refused connection goes elsewhere at once"
        router.until_up(but=(gone.name,))
        assert {router.replica_of(name) for name in own} == {"replica-2", "replica-3"}
        assert all(router.replica_of(name) == homes[name] for name in NAMES if name not in own)
    finally:
        gone.start()
    router.until_up()
    assert {name: router.replica_of(name) for name in NAMES} == homes


ILL = {
    "loses its tenants": lambda router, replica: replica.dead.add("toy"),
    "loses its front": lambda router, replica: replica.dead.add("hplm"),
    "is cut off": lambda router, replica: replica.cut(),
    # Over gRPC too: all backends follow.
    "is drained here": lambda router, replica: router.socket.ask(f"set server http/{replica.name} state drain"),
}


@pytest.mark.parametrize("happens", ILL.values(), ids=ILL)
def test_a_replica_that_is_not_well_gets_no_requests_of_any_kind(router, replicas, happens):
    assert replicas[1].probed == {"/v2/models/toy/infer", "/v2/models/hplm/infer"}
    happens(router, replicas[1])
    try:
        router.until_up(but=("replica-2",))
        assert {router.replica_of(name) for name in NAMES[:50]} == {"replica-1", "replica-3"}
    finally:
        router.socket.ask("set server http/replica-2 state ready")
        replicas[1].mend()


def test_without_a_replica_the_answer_tells_to_come_again(router, replicas):
    for one in replicas:
        one.drains = True
    router.until_up(but=("replica-1", "replica-2", "replica-3"))
    for way in ("header", "metadata"):
        refused = router.ask(NAMES[0], way=way).refused
        assert isinstance(refused, Draining) and refused.retry_after_s == 1, way
    assert b'haproxy_backend_active_servers{proxy="http"} 0' in metrics_of(router)  # which the alert HplmNoReplica reads


def metrics_of(router):
    with urllib.request.urlopen(f"http://127.0.0.1:{router.stats}/metrics", timeout=PATIENCE) as answer:
        return answer.read()


def test_metrics_are_on_loopback_unless_an_address_is_given(router):
    read = metrics_of(router)
    assert b'haproxy_server_status{proxy="http",server="replica-1"' in read
    assert b'haproxy_backend_active_servers{proxy="http"} 3' in read
    assert router.write("--stats", f"0.0.0.0:{router.stats}") == 0
    assert f"bind 0.0.0.0:{router.stats}\n" in (router.to / "haproxy.cfg").read_text("utf-8")


def test_tenants_are_divided_and_few_move_when_a_third_replica_comes(replicas, tmp_path):
    with routing(tmp_path, replicas[:2]) as router:
        before = {name: router.replica_of(name) for name in NAMES}
        router.describe(replicas)
        assert router.write() == 0
        router.reload()
        router.until_up()
        after = {name: router.replica_of(name) for name in NAMES}
        moved = [name for name in NAMES if after[name] != before[name]]
        assert {after[name] for name in moved} == {"replica-3"} and len(moved) <= 1.2 * len(NAMES) / 3
        assert max(Counter(after.values()).values()) <= 1.3 * len(NAMES) / 3


def test_of_popular_tenants_the_busiest_replica_has_at_most_half_as_much_again_as_the_mean(router, replicas):
    """Requests of 201 tenants by Zipf's law. The first one has 17 %, half of a replica's share: it is spread."""
    shares = {name: 1 / rank for rank, name in enumerate([BIG, *NAMES], start=1)}
    load = Counter[str]()
    for name, share in shares.items():
        times = len(replicas) if name == BIG else 1
        for _ in range(times):
            load[router.replica_of(name)] += share / times
    assert load.keys() == {one.name for one in replicas}
    assert max(load.values()) <= 1.5 * sum(load.values()) / len(replicas), load
