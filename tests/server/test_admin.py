"""Remote management on a real Triton: a tenant is added, changed and deleted while another one gets requests all the time."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.http
from safetensors.torch import load, save
from tritonclient.utils import InferenceServerException

from builder.store.store import TenantFile
from hplm.registry.folder import Folder
from hplm.server import probing
from hplm.server.held import holders
from testing.random_store import random_weights
from testing.toy import WORDS
from tests.server.asking import Asking
from tests.support.message import mentions
from tests.support.servers import ADMIN_KEY
from tests.support.wait import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

TEXT = " ".join(WORDS[:9])


class Admin:
    def __init__(self, server, key=ADMIN_KEY, backbone="toy"):
        self._model = f"{backbone}-admin"
        self._client = tritonclient.http.InferenceServerClient(server.http_url)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def __call__(self, command, **given):
        tensor = tritonclient.http.InferInput("COMMAND", [1], "BYTES")
        text = command if not given and command.startswith("{") else json.dumps({"command": command, **given})
        tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
        answer = self._client.infer(self._model, [tensor], headers=self._headers)
        return json.loads(answer.as_numpy("ANSWER")[0])


def trained(server, name, version=1, seed=7, labels=("x", "y")):
    """Returns what a client sends to add a tenant that it has trained itself."""
    tenant = TenantFile(name, version, "root", 1, "classify", list(labels), 4)
    adapter, head = random_weights(server.built.stores["toy"].config, tenant, 0.3, seed)
    tensors = {f"head.{key}": value.contiguous() for key, value in head.items()}
    tensors |= {f"adapter.{i}.{key}": value.contiguous() for i, layer in enumerate(adapter) for key, value in layer.items()}
    return {
        "id": name,
        "domain": "root",
        "domain_version": 1,
        "task": "classify",
        "labels": list(labels),
        "adapter": {"kind": "bottleneck", "rank": 4},
        "tensors": base64.b64encode(save(tensors)).decode(),
    }


def with_number(given, number):
    """Returns the same tenant with another number in its head, in 32 bits."""
    tensors = load(base64.b64decode(given["tensors"]))
    tensors["head.weight"] = tensors["head.weight"].float()
    tensors["head.weight"][0, 0] = number
    return {**given, "tensors": base64.b64encode(save(tensors)).decode()}


@pytest.fixture
def acme(server):
    """An id that a test may give to a tenant of its own."""
    return server.named("acme")


def test_a_tenant_is_added_changed_and_deleted_under_load(server, acme):
    admin, stock = Admin(server), server.stock()
    with Asking(server.stock, ["echo"], [TEXT], clients=2) as load:
        with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
            stock.ask([TEXT], acme)
        added = admin("tenant.add", **trained(server, acme))
        assert (added["after"], added["late"]) == (1, [])
        first = stock.ask([TEXT], acme)  # every reader has the tenant, so it answers at once
        np.testing.assert_allclose(first["LOGITS"][0], server.reference().forward(TEXT, acme), atol=1e-3)
        assert admin("tenant.update", **trained(server, acme, 2, seed=8))["after"] == 2
        second = stock.ask([TEXT], acme)
        assert second["VERSION"][0, 0] == b"2" and np.abs(second["LOGITS"] - first["LOGITS"]).max() > 0.01
        assert admin("tenant.rollback", id=acme)["after"] == 1
        assert np.allclose(stock.ask([TEXT], acme)["LOGITS"], first["LOGITS"], atol=1e-5)
        assert {"id": acme, "version": 1} in admin("tenant.list")["tenants"]
        secret = admin("tenant.key.add", id=acme, days=1)
        assert secret["secret"].startswith("hplm_") and "secret" not in str(admin("tenant.show", id=acme))
        with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
            stock.ask([TEXT], acme)
        assert admin("tenant.delete", id=acme)["after"] is None
        with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
            stock.ask([TEXT], acme)
        assert admin("tenant.compact")["bytes"] >= 0
        actions = [change["action"] for change in admin("log")["changes"]]
        told = [f"tenant {what}" for what in ("add", "update", "rollback", "key add", "delete")]
        assert told in (actions[-5:], actions[4::-1])
        load.wait_for(lambda *answer: True)
    assert not load.failures(), load.failures()[:3]


def test_a_probe_is_answered_while_a_command_waits_for_another_manager(server, acme):
    with ThreadPoolExecutor(1) as pool:
        assert Admin(server)("tenant.add", **trained(server, acme))["after"] == 1
        control = server.server.control()
        with Folder(server.state / "toy").alone():
            deleted = pool.submit(lambda: Admin(server)("tenant.delete", id=acme))  # a client belongs to one thread
            eventually(lambda: [one.held for one in holders(server.server.id) if one.model == "toy-admin"] == [1])
            probe = control.probes(["toy-admin"])["toy-admin"]
            assert control.probe("toy-admin", probe, PATIENCE).state is probing.State.WORKS
            assert not deleted.done()
        assert deleted.result(PATIENCE)["after"] is None


def test_wrong_keys_and_wrong_commands_are_refused(server, acme):
    good = trained(server, acme)
    for key in (None, "wrong", ""):
        with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
            Admin(server, key)("tenant.list")
    admin = Admin(server)
    before = admin("tenant.list")["tenants"]
    for command, given, named in [
        ('{"command": "tenant.explode"}', {}, ["tenant.list"]),
        ("tenant.delete", {"id": "nobody"}, ["'nobody'"]),
        ("tenant.delete", {}, ["tenant.delete", "'id'"]),
        ("tenant.add", {**good, "labels": []}, ["'labels'"]),
        ("tenant.add", {**good, "tensors": "!!"}, ["'tensors'", "safetensors", "base64"]),
        ("tenant.add", {**good, "adapter": {"kind": "bottleneck", "rank": 5}}, ["'adapter.0.attention_out/down'"]),
        ("tenant.add", {**good, "adapter": {"kind": "magic", "rank": 4}}, ["'magic'"]),
        ("tenant.add", with_number(good, float("nan")), ["'head.weight'", "fp16"]),
        ("tenant.add", with_number(good, 1e6), ["'head.weight'", "fp16"]),
        ("tenant.add", {**good, "domain": "med"}, ["'med'"]),
        ("tenant.limit", {"id": "echo", "rate": -1}, ["'rate'"]),
        ("tenant.limit", {"id": "echo", "rate": True}, ["'rate'", "'burst'", "'in_flight'", "'deadline_us'"]),
        ("tenant.limit", {"id": "echo", "token_us": 5000}, ["'echo'", "classify", "'token_us'"]),
        ("domain.add", {"name": "../../etc", "version": 1}, ["../../etc/1"]),
        ("domain.delete", {"name": "root"}, ["root"]),
    ]:
        with pytest.raises(InferenceServerException, match=r"\[invalid_input\]") as refused:
            admin(command, **given)
        assert mentions(refused.value, *named)
    assert admin("tenant.list")["tenants"] == before
