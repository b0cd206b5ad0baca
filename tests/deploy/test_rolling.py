"""One server takes over from another behind the front door and under load, as docs/operating.md says it. The servers are fakes.

What a real one answers while it stops: `tests/server/test_held.py`.
"""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from hplm.cluster import router
from hplm.cluster.description import FORMAT, KIND, Replica, Replicas
from hplm.cluster.router import CONFIG, ENCODER, SOCKET, write_files
from hplm.server.probing import probe_of
from hplm_client.errors import Draining, SafeToRetry
from loadtest.proxy import AdminSocket
from tests.cluster.front import CLOSED
from tests.cluster.router import fake_servers
from tests.deploy.door import haproxy, require_haproxy
from tests.deploy.image import DEPLOY
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

DRAIN, STATE = "set server http/one state drain", "show stat"
BACKENDS = {"http", "grpc", "few_http", "few_grpc", "medium", "large", "large_grpc"}
SIZES = (1, 60_000, 1_200_000)  # small, medium and large ones
# Each client sends these. Over gRPC few large requests of one address may be on their way.
CLIENTS = {("json", "binary"): SIZES, ("binary", "header"): SIZES, ("metadata",): SIZES[:1], ("message",): SIZES[:1]}
MANY = 20  # answers
STOPPING = "[draining] the server is being stopped"


@contextmanager
def asking(door):
    """Asks without a pause, and a refused request again as hplm_client does. Yields how many answers each server has given."""
    found, ended = Counter(), threading.Event()

    def ask_on(ways, sizes):
        rng = random.Random(len(ways) + len(sizes))
        while not ended.is_set():
            given = {"tenant": f"tenant-{rng.randrange(8)}", "way": rng.choice(ways), "size": rng.choice(sizes)}
            answer = door.ask(**given)
            while isinstance(answer.refused, SafeToRetry):
                answer = door.ask(**given)
            found[answer.replica] += 1

    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        clients = [pool.submit(ask_on, *sent) for sent in CLIENTS.items()]
        try:
            yield found
        finally:
            ended.set()
            for client in clients:
                client.result(PATIENCE)


def is_out(door, server, state):
    """Whether a server is in this state, and the door has all answers of requests that it has passed to it."""
    found = [row for row in door.socket.statistics() if row["svname"] == server]
    assert {row["pxname"] for row in found} == BACKENDS
    return all(row["status"].startswith(state) and row["scur"] == "0" for row in found)


def test_no_request_fails_while_another_server_takes_over(tmp_path_factory):
    """Twice: one server is taken out of the door, and later the other one drains and ends."""
    documented = (DEPLOY.parent / "docs" / "operating.md").read_text("utf-8")
    assert DRAIN in documented and STATE in documented
    require_haproxy()
    many = dict.fromkeys(("HPLM_REQUESTS", "HPLM_REFUSED", "HPLM_HANDSHAKES"), 1_000_000)
    with fake_servers(2, "server-") as (one, two):
        folder = tmp_path_factory.mktemp("d")  # a socket's path must be short
        replicas = (Replica(1, "one", one.http_url, one.grpc_url), Replica(2, "two", two.http_url, two.grpc_url))
        write_files(router.door(Replicas(KIND, FORMAT, ".", replicas), {"toy": probe_of(ENCODER)}, folder), folder)
        with haproxy(folder, CLOSED, CLOSED, "toy", config=folder / CONFIG, **many) as door, asking(door) as answered:
            door.socket = AdminSocket(folder / SOCKET)

            def only(server):
                """Waits for many answers, which this server alone gives from now on. Others were only to be counted yet."""
                before = answered.copy()
                eventually(lambda: answered[server.name] >= before[server.name] + MANY)
                given = answered - before
                assert given.total() - given[server.name] <= len(CLIENTS)

            eventually(lambda: min(answered["server-1"], answered["server-2"]) >= MANY)
            two.refusal = STOPPING
            assert {door.ask(f"tenant-{number}").replica for number in range(8)} == {"server-1"}  # over HTTP, small
            one.refusal = STOPPING
            assert isinstance((told := door.ask("tenant-1")).refused, Draining) and told.status == 503
            one.refusal = two.refusal = ""
            assert not door.socket.ask(DRAIN).strip()
            eventually(lambda: is_out(door, "one", "DRAIN"))
            only(two)
            assert not door.socket.ask(DRAIN.replace("drain", "ready")).strip()
            eventually(lambda: answered["server-1"] > MANY)
            two.drains, two.refusal = True, STOPPING
            eventually(lambda: is_out(door, "two", "DOWN"))
            two.stop()
            only(one)
