"""A server is replaced by one with another backbone, behind the front door and under load, as docs/operating.md says it."""

import random
import threading
from contextlib import ExitStack

import numpy as np
import pytest
from geventhttpclient.response import HTTPConnectionClosed
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
from tests.deploy.door import StockAtDoor, haproxy, require_haproxy
from tests.deploy.image import DEPLOY
from tests.server.asking import Asking
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

NAMES = [tenant.id for tenant in TENANTS if tenant.task == "classify"]
TEXTS = [random_text(random.Random(seed), 40) for seed in range(5)]
CLIENTS = 4
DRAIN, STATE = "set server http/one state drain", "show stat"
BACKENDS = {"http", "grpc", "few_http", "few_grpc", "medium", "large", "large_grpc"}
MANY = 20  # answers
REFUSED_STREAM = "RST_STREAM with error code 7"


class PatientStock(StockAtDoor):
    """Sends a request again as hplm_client does, more often because a busy door sees late that a server drains.

    Also as HTTP says: when a kept connection ends without a byte of an answer, and over gRPC when a stream is refused. HAProxy
    ends a client's so if the server has just ended its own, since only the client knows that a request may be sent twice.
    """

    _pause = threading.Event()  # is never set
    _is_kept = False

    def ask(self, *arguments, **parameters):
        attempts = Settings("localhost:1", retries=10).attempts()
        while True:
            try:
                answer = super().ask(*arguments, **parameters)
                self._is_kept = True
                return answer
            except HTTPConnectionClosed:
                if not self._is_kept:
                    raise
                self._is_kept = False
            except InferenceServerException as error:
                said = refusal(error.message(), error.status())
                if self._is_kept and REFUSED_STREAM in error.message():
                    self._is_kept = False
                    continue
                if not isinstance(said, SafeToRetry):
                    raise said from error
                self._pause.wait(attempts.pause_s(said))


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    """A repository of the same backbone and tenants with other weights and tables."""
    store = random_store(tmp_path_factory.mktemp("changed") / "store", CONFIG, TENANTS, DOMAINS, spread=0.3, seed=100)
    repository = tmp_path_factory.mktemp("new") / "repository"
    export(store, repository, ServingOptions(dtype="fp32", slots=4, batch_tokens=256))
    return repository


def like(folder):
    """Returns the answers of a backbone, and a condition for answers that are these."""
    reference = Reference.open(folder)
    known = {(name, text): reference.forward(text, name).numpy() for name in NAMES for text in TEXTS}

    def seen(tenant, text, answer):
        return not isinstance(answer, Exception) and np.abs(answer["LOGITS"][0] - known[tenant, text]).max() <= 1e-3

    return known, seen


def in_progress(door, server):
    """Returns how many requests the door has passed to a server without an answer yet."""
    found = [row for row in door.rows() if row["svname"] == server]
    assert {row["pxname"] for row in found} == BACKENDS
    return sum(int(row["scur"]) for row in found)


def test_no_request_fails_while_another_backbone_takes_over(server, new, tmp_path_factory):
    """Twice: one server is taken out of the door, and later the other is stopped at once. Takes the time of one start."""
    require_haproxy()
    documented = (DEPLOY.parent / "docs" / "operating.md").read_text("utf-8")
    assert DRAIN in documented and STATE in documented
    (old_answers, is_old), (new_answers, is_new) = like(server.model_folder()), like(new / "toy" / "1")
    assert all(np.abs(old - new_answers[asked]).max() > 0.01 for asked, old in old_answers.items()), (
        "nobody could tell them apart"
    )
    (http, grpc), folder = free_ports(2), tmp_path_factory.mktemp("r")
    second = {"HPLM_HTTP_2": f"127.0.0.1:{http}", "HPLM_GRPC_2": f"127.0.0.1:{grpc}", "HPLM_DOOR_SOCKET": folder / "socket"}
    with haproxy(folder, server.http_url, server.grpc_url, "toy", **second) as door, ExitStack() as ending:
        with Asking(lambda protocol: StockAtDoor(door, protocol), NAMES, TEXTS, CLIENTS) as load:
            load.wait_for(is_old, MANY)
            other = ending.enter_context(TritonServer(new, http_port=http, grpc_port=grpc))
            load.wait_for(is_new, MANY)  # both serve
            assert not door.socket.ask(DRAIN).strip()
            eventually(lambda: not in_progress(door, "one"))
            check_taken_over(load, is_old, is_new)
        assert not door.socket.ask(DRAIN.replace("drain", "ready")).strip()
        with Asking(lambda protocol: PatientStock(door, protocol), NAMES, TEXTS, CLIENTS) as load:
            load.wait_for(is_old, MANY)
            other.stop()
            check_taken_over(load, is_new, is_old)


def check_taken_over(load, before, after):
    """No request has failed, each has had one of both answers, and only those that were still to be noted had the earlier."""
    stopped = len(load.answers)
    load.wait_for(after, MANY)
    load.end()
    assert not load.failures(), [str(one) for one in load.failures()[:3]]
    assert all(before(*answer) or after(*answer) for answer in load.answers)
    assert sum(before(*answer) for answer in load.answers[stopped:]) <= CLIENTS
