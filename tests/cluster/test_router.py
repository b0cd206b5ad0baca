"""The router's rules, before stand-ins: the real HAProxy with the file that `hplm route` writes."""

import http.client
import json
import random
import struct
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.router import INFER, require_haproxy, routing, stand_ins, tenant
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

NAMES = [f"tenant-{number}" for number in range(300)]
LIMITED = [f"limited-{number}" for number in range(100)]
SHARED, EVERYWHERE = "shared", "everywhere"  # with two and with three homes
TENANTS = [
    *map(tenant, NAMES),
    *(tenant(name, rate=5.0) for name in LIMITED),
    tenant(SHARED, tokens_rate=100.0, homes=2),
    tenant(EVERYWHERE, in_flight=9, homes=3),
]
TEXT = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}


@pytest.fixture(scope="module")
def replicas():
    require_haproxy()
    with stand_ins(3) as found:
        yield found


@pytest.fixture(scope="module")
def router(replicas, tmp_path_factory):
    with routing(tmp_path_factory.mktemp("router"), replicas, TENANTS) as router:
        yield router


@pytest.fixture(autouse=True)
def all_well(router, replicas):
    yield
    for one in replicas:
        one.drains, one.says = False, None
        one.dead.clear()
        one.may_answer.set()
    router.until_up()


def in_json(router, name):
    return router.post({"inputs": [TEXT], "parameters": {"tenant": name}})


def in_binary(router, name, size=1000):
    data = struct.pack("<I", size) + b'"}' * (size // 2)
    given = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [given], "parameters": {"tenant": name}}).encode()
    return router.post(head + data, inference_header_content_length=str(len(head)))


def in_generate(router, name):
    return router.post({"text_input": "a", "tenant": name}, "/v2/models/toy/generate")


def in_header(router, name):
    return router.post({"inputs": [TEXT]}, hplm_tenant=name)


@pytest.mark.parametrize("ask", [in_json, in_binary, in_generate])
def test_a_tenant_has_one_replica_however_it_is_named(router, replicas, ask):
    for name in NAMES[:20]:
        home = router.replica_of(name)
        router.until_idle()
        before = {one.name: one.tenants[name] for one in replicas}
        assert ask(router, name)[1]["replica"] == home
        assert {one.name: one.tenants[name] - before[one.name] for one in replicas} == {
            one.name: int(one.name == home) for one in replicas
        }, "the header is added, so that lookup can compare"


def test_tenants_and_homes_are_spread_over_all_replicas(router):
    homes = Counter(map(router.replica_of, NAMES))
    assert len(homes) == 3 and max(homes.values()) <= 1.3 * len(NAMES) / 3
    assert len(set(map(router.replica_of, LIMITED))) == 3


def test_the_busiest_replica_has_little_more_than_its_part_of_a_zipf(router, replicas):
    """Requests in flight overflow where one tenant has many."""
    drawn = random.Random(0).choices(NAMES, weights=[1 / rank for rank in range(1, len(NAMES) + 1)], k=90)
    before = [one.tenants.total() for one in replicas]
    for one in replicas:
        one.may_answer.clear()
    with ThreadPoolExecutor(len(drawn)) as clients:
        asked = [clients.submit(in_header, router, name) for name in drawn]
        eventually(lambda: sum(one.tenants.total() for one in replicas) - sum(before) == len(drawn))
        got = [one.tenants.total() - was for one, was in zip(replicas, before, strict=True)]
        for one in replicas:
            one.may_answer.set()
        assert all(one.result()[0] == 200 for one in asked)
    assert max(got) <= 1.3 * len(drawn) / 3


def test_a_replica_that_has_the_only_request_in_flight_passes_the_next_one_on(router, replicas):
    """HAProxy counts whole requests: 1.25 times two requests, of three replicas, is one for each."""
    home = router.replica_of(NAMES[0])
    router.until_idle()
    (own,) = [one for one in replicas if one.name == home]
    before = own.tenants[NAMES[0]]
    own.may_answer.clear()
    with ThreadPoolExecutor(1) as client:
        first = client.submit(in_header, router, NAMES[0])
        try:
            eventually(lambda: own.tenants[NAMES[0]] > before)
            assert in_header(router, NAMES[0])[1]["replica"] != home
        finally:
            own.may_answer.set()
        assert first.result()[1]["replica"] == home


@pytest.mark.parametrize("name", ["", "Loud", "a b", "-", "x" * 65])
def test_a_name_that_no_tenant_has_goes_to_all_in_turn(router, name):
    answers = [in_json(router, name) for _ in range(9)]
    assert {answer[1]["replica"] for answer in answers} == {"replica-1", "replica-2", "replica-3"}


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"parameters":{"ten\\u0061nt":"limited-0"}}',
        b'{"parameters":{"tenant":"Limited-0"}}',
        b'{"parameters":{"tenant":"limited-0\\u0000x"}}',  # Triton would read limited-0
        b'{"parameters":{"tenant":"limited-0\\n"}}',
        b"{",
        b"",
        b"[" * 5000,
        b'{"parameters":{"tenant":["a"]}}',
        b'{"parameters":7}',
        b"\0\xff",
    ],
)
def test_a_server_is_told_that_no_tenant_was_seen(router, replicas, body):
    """So nobody spreads the requests of a tenant with quotas over all replicas by hiding its name."""
    before = sum(one.tenants["-"] for one in replicas)
    for headers in ({}, {"hplm_tenant": "Limited-0"}):
        assert router.post(body, **headers)[0] == 200
    assert sum(one.tenants["-"] for one in replicas) == before + 2


def test_other_paths_are_passed_on(router):
    assert router.send("GET", "/v2/health/ready")[1]["path"] == "/v2/health/ready"


def test_a_large_request_must_show_its_tenant(router):
    text = {**TEXT, "data": ["a" * 100_000]}
    status, answer = router.post({"inputs": [text], "parameters": {"tenant": NAMES[0]}})
    assert status == 400 and "[invalid_input]" in answer["error"] and "hplm-tenant" in answer["error"]
    for body, headers in (
        ({"inputs": [text]}, {"hplm_tenant": LIMITED[0]}),
        ({"parameters": {"tenant": LIMITED[0]}, "inputs": [text]}, {}),  # its parameters come first
    ):
        assert router.post(body, **headers)[1]["replica"] == router.replica_of(LIMITED[0])


def test_two_headers_arrive_as_one(router, replicas):
    """Otherwise the router and lookup might each read another one of them."""
    before = [Counter(one.tenants) for one in replicas]
    connection = [("hplm-tenant", NAMES[0]), ("hplm-tenant", NAMES[1])]
    status, _ = send_raw(router, connection)
    assert status == 200
    got = sum((one.tenants - was for one, was in zip(replicas, before, strict=True)), Counter())
    assert got in (Counter([NAMES[0]]), Counter([NAMES[1]]))


def send_raw(router, headers):
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=60)
    connection.putrequest("POST", INFER)
    for name, value in [*headers, ("content-length", "2")]:
        connection.putheader(name, value)
    connection.endheaders(b"{}")
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_tenant_with_quotas_has_one_home_even_under_load(router, replicas):
    name = LIMITED[0]
    home = router.replica_of(name)
    before = sum(one.tenants[name] for one in replicas)
    for one in replicas:
        one.may_answer.clear()
    with ThreadPoolExecutor(20) as clients:
        asked = [clients.submit(in_header, router, name) for _ in range(20)]
        eventually(lambda: sum(one.tenants[name] for one in replicas) == before + 20)
        for one in replicas:
            one.may_answer.set()
        assert {one.result()[1]["replica"] for one in asked} == {home}


@pytest.mark.parametrize(("name", "homes"), [(SHARED, 2), (EVERYWHERE, 3)])
def test_a_tenant_uses_exactly_its_homes(router, name, homes):
    used = Counter(router.replica_of(name) for _ in range(90))
    assert len(used) == homes and min(used.values()) >= 90 / homes / 3


@pytest.mark.parametrize("routers", [1, 4])
def test_a_replica_gets_no_more_requests_than_triton_bears_whatever_is_away(tmp_path, routers):
    with stand_ins(3) as replicas, routing(tmp_path, replicas, TENANTS, "--routers", str(routers)) as router:
        for one in replicas[:2]:
            one.stop()
        router.until_up(but=("replica-1", "replica-2"))
        replicas[2].may_answer.clear()
        most = (160 + 96) // routers
        names = [*LIMITED, *LIMITED, *NAMES]
        with ThreadPoolExecutor(len(names)) as clients:
            asked = [clients.submit(in_header, router, name) for name in names]
            eventually(lambda: sum(one.done() for one in asked) == len(names) - most)  # those that wait for too long
            assert replicas[2].tenants.total() == most
            replicas[2].may_answer.set()
            assert Counter(one.result()[0] for one in asked) == {200: most, 503: len(names) - most}


def test_what_a_replica_refuses_is_passed_on_and_not_asked_again(router, replicas):
    for one in replicas:
        one.says = 503, b'{"error":"[quota] retry after 1 s"}'
    before = sum(one.tenants.total() for one in replicas)
    assert in_header(router, NAMES[0]) == (503, {"error": "[quota] retry after 1 s"})
    assert sum(one.tenants.total() for one in replicas) == before + 1
    router.until_up()


def test_a_killed_replica_is_routed_round_and_comes_back(router, replicas):
    gone, everybody = replicas[0], (*NAMES, *LIMITED)
    homes = {name: router.replica_of(name) for name in everybody}
    own = [name for name in everybody if homes[name] == gone.name]
    gone.stop()
    try:
        for name in (*own[:3], own[-1]):  # of which the last one has quotas
            status, answer = in_header(router, name)
            assert status == 200 and answer["replica"] != gone.name, "a refused connection goes elsewhere at once"
        router.until_up(but=(gone.name,))
        assert {router.replica_of(name) for name in own} == {"replica-2", "replica-3"}
        assert len({router.replica_of(own[-1]) for _ in range(10)}) == 1
        assert all(router.replica_of(name) == homes[name] for name in everybody if name not in own)
    finally:
        gone.start()
    router.until_up()
    assert {name: router.replica_of(name) for name in everybody} == homes


def loses_its_tenants(router, replica):
    assert replica.probed == {"/v2/models/toy/infer", "/v2/models/hplm/infer"}
    replica.dead.add("toy")


def loses_its_front(router, replica):
    replica.dead.add("hplm")


def drains(router, replica):
    replica.drains = True


def is_drained_here(router, replica):
    """Over gRPC and for tenants with quotas too: all backends follow the pool's."""
    assert not router.socket.ask(f"set server all/{replica.name} state drain").strip()


@pytest.mark.parametrize("happens", [loses_its_tenants, loses_its_front, drains, is_drained_here])
def test_a_replica_that_is_not_well_gets_no_requests_of_any_kind(router, replicas, happens):
    happens(router, replicas[1])
    try:
        router.until_up(but=("replica-2",))
        assert {router.replica_of(name) for name in (*NAMES[:50], *LIMITED)} == {"replica-1", "replica-3"}
    finally:
        router.socket.ask("set server all/replica-2 state ready")


def test_without_a_replica_the_answer_tells_to_come_again(router, replicas):
    for one in replicas:
        one.drains = True
    router.until_up(but=("replica-1", "replica-2", "replica-3"))
    for name in (NAMES[0], LIMITED[0]):
        status, answer = in_header(router, name)
        assert status == 503 and "[draining]" in answer["error"] and "retry after" in answer["error"]
    assert b'haproxy_backend_active_servers{proxy="all"} 0' in metrics_of(router)  # which the alert HplmNoReplica reads


def metrics_of(router):
    with urllib.request.urlopen(f"http://127.0.0.1:{router.stats}/metrics", timeout=60) as answer:
        return answer.read()


def test_metrics_are_on_loopback_unless_an_address_is_given(router):
    read = metrics_of(router)
    assert b'haproxy_server_status{proxy="all",server="replica-1"' in read
    assert b'haproxy_backend_active_servers{proxy="all"} 3' in read
    assert router.write("--stats-address", "0.0.0.0") == 0
    assert f"bind 0.0.0.0:{router.stats}\n" in (router.to / "haproxy.cfg").read_text("utf-8")


def test_few_tenants_move_when_a_third_replica_comes(replicas, tmp_path):
    with routing(tmp_path, replicas[:2], TENANTS) as router:
        before = {name: router.replica_of(name) for name in (*NAMES, *LIMITED)}
        router.stop()
        router.describe({"all": replicas})
        assert router.write() == 0
        router.start()
        router.until_up()
        for names in (NAMES, LIMITED):
            moved = [name for name in names if router.replica_of(name) != before[name]]
            assert {router.replica_of(name) for name in moved} == {"replica-3"}
            assert len(moved) <= 1.2 * len(names) / 3
