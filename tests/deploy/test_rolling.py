"""A server is replaced by one with another backbone, behind the front door and under load, as docs/operating.md says it."""

import csv
import random
import threading
from contextlib import ExitStack

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.server import TritonServer
from hplm.server.ports import free_ports
from hplm_client.errors import SafeToRetry, refusal
from hplm_client.settings import Settings
from testing.random_store import random_store
from testing.reference import Reference
from testing.toy import CONFIG, DOMAINS, TENANTS, random_text
from tests.deploy.door import StockAtDoor, command, haproxy, require_haproxy
from tests.deploy.image import DEPLOY
from tests.server.asking import Asking
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

NAMES = [tenant.id for tenant in TENANTS if tenant.task == "classify"]
TEXTS = [random_text(random.Random(seed), 40) for seed in range(5)]
OPTIONS = ServingOptions(dtype="fp32", slots=4, batch_tokens=256)
CLIENTS = 4
DRAIN, STATE = "set server http/one state drain", "show stat"
MANY = 20  # answers


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A store of the same backbone and tenants with other weights and tables."""
    return random_store(tmp_path_factory.mktemp("changed") / "store", CONFIG, TENANTS, DOMAINS, spread=0.3, seed=100)


@pytest.fixture(scope="module")
def new(changed, tmp_path_factory):
    repository = tmp_path_factory.mktemp("new") / "repository"
    export(changed, repository, OPTIONS)
    return repository


@pytest.fixture(scope="module")
def expected(servers, new):
    """The answers of the old and of the new backbone."""
    known = []
    for folder in (servers.get("toy").model_folder(), new / "toy" / "1"):
        reference = Reference.open(folder)
        known.append({(name, text): reference.forward(text, name).numpy() for name in NAMES for text in TEXTS})
    for asked, old in known[0].items():  # otherwise nobody could tell them apart
        assert np.abs(old - known[1][asked]).max() > 0.01
    return known


class PatientStock(StockAtDoor):
    """Sends a request again as hplm_client does, more often because a busy door sees late that a server drains."""

    _pause = threading.Event()  # is never set

    def ask(self, *arguments, **parameters):
        attempts = Settings("localhost:1", retries=10).attempts()
        while True:
            try:
                return super().ask(*arguments, **parameters)
            except InferenceServerException as error:
                said = refusal(error.message(), error.status())
                if not isinstance(said, SafeToRetry):
                    raise said from error
                pause = attempts.pause_s(said)
            self._pause.wait(pause)


def in_progress(path, server):
    """Returns how many requests the door has passed to a server without an answer yet."""
    rows = list(csv.DictReader(command(path, STATE).removeprefix("# ").splitlines()))
    found = [row for row in rows if row["svname"] == server]
    assert {row["pxname"] for row in found} == {"http", "grpc", "few_http", "few_grpc", "medium", "large", "large_grpc"}
    return sum(int(row["scur"]) for row in found)


def like(known):
    """Returns a condition for answers that are these."""

    def seen(tenant, text, answer):
        return not isinstance(answer, Exception) and np.abs(answer["LOGITS"][0] - known[tenant, text]).max() <= 1e-3

    return seen


def test_no_request_fails_while_another_backbone_takes_over(server, new, expected, tmp_path):
    """Twice: one server is taken out of the door, and later the other is stopped at once."""
    require_haproxy()
    documented = (DEPLOY.parent / "docs" / "operating.md").read_text("utf-8")
    assert DRAIN in documented and STATE in documented
    (http, grpc), door_socket = free_ports(2), tmp_path / "socket"
    settings = {"HPLM_HTTP_2": f"127.0.0.1:{http}", "HPLM_GRPC_2": f"127.0.0.1:{grpc}", "HPLM_DOOR_SOCKET": door_socket}
    is_old, is_new = map(like, expected)
    with haproxy(tmp_path / "door", server.http_url, server.grpc_url, "toy", **settings) as door, ExitStack() as ending:
        with Asking(lambda protocol: StockAtDoor(door, protocol), NAMES, TEXTS, CLIENTS) as load:
            load.wait_for(is_old, MANY)
            second = ending.enter_context(TritonServer(new, http_port=http, grpc_port=grpc))
            load.wait_for(is_new, MANY)  # both serve
            assert not command(door_socket, DRAIN)
            eventually(lambda: not in_progress(door_socket, "one"))
            check_taken_over(load, is_old, is_new)
        assert not command(door_socket, DRAIN.replace("drain", "ready"))
        with Asking(lambda protocol: PatientStock(door, protocol), NAMES, TEXTS, CLIENTS) as load:
            load.wait_for(is_old, MANY)
            second.stop()
            check_taken_over(load, is_new, is_old)


def check_taken_over(load, before, after):
    """No request has failed, each has had one of both answers, and only those that were still to be noted had the earlier."""
    stopped = len(load.answers)
    load.wait_for(after, MANY)
    load.end()
    assert not load.failures(), [str(one) for one in load.failures()[:3]]
    assert all(before(*answer) or after(*answer) for answer in load.answers)
    assert sum(before(*answer) for answer in load.answers[stopped:]) <= CLIENTS
