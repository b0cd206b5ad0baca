"""Remote management on a real Triton: a tenant is added, changed and deleted while another one gets requests all the time."""

import base64
import json
import shutil
import sqlite3
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import tritonclient.http
from safetensors.torch import load, save
from tritonclient.utils import InferenceServerException

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from hplm.errors import HplmError
from hplm.server import TritonServer, probing
from hplm.server.held import holders
from hplm.tenants.state import State
from testing.random_store import random_store, random_tenant, random_tenants
from testing.reference import Reference
from testing.toy import CONFIG, WORDS
from tests.server.stock import Stock
from tests.support.message import mentions
from tests.support.servers import serving
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

KEY = "a secret of the operator"
TEXT = " ".join(WORDS[:9])


@pytest.fixture
def place(tmp_path, monkeypatch):
    store = random_store(tmp_path / "store", CONFIG, random_tenants(2, 4, 3), corpus_tokens=2000, spread=0.3)
    export(store, tmp_path / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256, admin=True))
    monkeypatch.setenv("HPLM_ADMIN_KEY", f"{KEY}\n")  # with a newline, as at the end of a file
    State(tmp_path / "state/toy").begin()
    return store, tmp_path / "repository", tmp_path / "state"


class Admin:
    def __init__(self, server, key=KEY, backbone="toy"):
        self._model = f"{backbone}-admin"
        self._client = tritonclient.http.InferenceServerClient(server.http_url)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def __call__(self, command, **given):
        tensor = tritonclient.http.InferInput("COMMAND", [1], "BYTES")
        text = command if not given and command.startswith("{") else json.dumps({"command": command, **given})
        tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
        answer = self._client.infer(self._model, [tensor], headers=self._headers)
        return json.loads(answer.as_numpy("ANSWER")[0])


def trained(store, name, version=1, seed=7, labels=("x", "y")):
    """Returns what a client sends to add a tenant that it has trained itself."""
    tenant = TenantFile(name, version, "root", 1, "classify", list(labels), 4)
    random_tenant(store, tenant, 0.3, seed)
    adapter, head = store.tenant_weights(tenant)
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


def test_a_tenant_is_added_changed_and_deleted_under_load(place):
    store, repository, state = place
    with serving(repository, state=state) as server:
        admin, stock, end, failures = Admin(server), Stock(server, "http"), threading.Event(), []

        def neighbour():
            mine = Stock(server, "grpc")
            while not end.is_set():
                try:
                    mine.ask([TEXT], "tenant-1")
                except Exception as error:
                    failures.append(error)

        thread = threading.Thread(target=neighbour)
        thread.start()
        try:
            with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
                stock.ask([TEXT], "acme")
            added = admin("tenant.add", **trained(store, "acme"))
            assert (added["after"], added["late"]) == (1, [])
            first = stock.ask([TEXT], "acme")  # every reader has the tenant, so it answers at once
            reference = Reference.open(repository / "toy/1", state)
            np.testing.assert_allclose(first["LOGITS"][0], reference.forward(TEXT, "acme"), atol=1e-3)
            assert admin("tenant.update", **trained(store, "acme", 2, seed=8))["after"] == 2
            second = stock.ask([TEXT], "acme")
            assert second["VERSION"][0, 0] == b"2" and np.abs(second["LOGITS"] - first["LOGITS"]).max() > 0.01
            assert admin("tenant.rollback", id="acme")["after"] == 1
            assert np.allclose(stock.ask([TEXT], "acme")["LOGITS"], first["LOGITS"], atol=1e-5)
            assert {"id": "acme", "version": 1} in admin("tenant.list")["tenants"]
            secret = admin("tenant.key.add", id="acme", days=1)
            assert secret["secret"].startswith("hplm_") and "secret" not in str(admin("tenant.show", id="acme"))
            with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
                stock.ask([TEXT], "acme")
            assert admin("tenant.delete", id="acme")["after"] is None
            with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
                stock.ask([TEXT], "acme")
            assert admin("tenant.compact")["bytes"] == 0  # a freed record is kept for a minute
            actions = [change["action"] for change in admin("log")["changes"]]
            assert actions == [f"tenant {what}" for what in ("add", "update", "rollback", "key add", "delete")] + ["compact"]
        finally:
            end.set()
            thread.join(60)
        assert not failures, failures[:3]


def test_a_probe_is_answered_while_a_command_waits_for_another_manager(place):
    store, repository, state = place
    with serving(repository, state=state) as server, ThreadPoolExecutor(1) as pool:
        assert Admin(server)("tenant.add", **trained(store, "acme"))["after"] == 1
        control = server.control()
        with closing(sqlite3.connect(state / "toy/registry.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            deleted = pool.submit(lambda: Admin(server)("tenant.delete", id="acme"))  # a client belongs to one thread
            eventually(lambda: [one.held for one in holders(server.id) if one.model == "toy-admin"] == [1])
            probe = control.probes(["toy-admin"])["toy-admin"]
            assert control.probe("toy-admin", probe, PATIENCE).state is probing.State.WORKS
            assert not deleted.done()
            other.execute("ROLLBACK")
        assert deleted.result(PATIENCE)["after"] is None


def test_wrong_keys_and_wrong_commands_are_refused(place):
    store, repository, state = place
    good = trained(store, "acme")
    with serving(repository, state=state) as server:
        for key in (None, "wrong", ""):
            with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
                Admin(server, key)("tenant.list")
        admin = Admin(server)
        for command, given, named in [
            ("{", {}, ["JSON"]),
            ('{"command": "tenant.explode"}', {}, ["tenant.list"]),
            ("tenant.delete", {"id": "../x"}, ["'../x'"]),
            ("tenant.delete", {"id": "nobody"}, ["'nobody'"]),
            ("tenant.delete", {}, ["tenant.delete", "'id'"]),
            ("tenant.add", {**good, "labels": []}, ["'labels'"]),
            ("tenant.add", {**good, "tensors": "!!"}, ["'tensors'", "safetensors", "base64"]),
            ("tenant.add", {**good, "adapter": {"kind": "bottleneck", "rank": 5}}, ["'adapter.0.attention_out/down'"]),
            ("tenant.add", {**good, "adapter": {"kind": "magic", "rank": 4}}, ["'magic'"]),
            ("tenant.add", with_number(good, float("nan")), ["'head.weight'", "fp16"]),
            ("tenant.add", with_number(good, 1e6), ["'head.weight'", "fp16"]),
            ("tenant.add", {**good, "domain": "law"}, ["'law'"]),
            ("tenant.limit", {"id": "tenant-0", "rate": -1}, ["'rate'"]),
            ("tenant.limit", {"id": "tenant-0", "deadline_us": 2500.5}, ["'deadline_us'"]),
            ("tenant.limit", {"id": "tenant-0", "homes": 1.5}, ["'homes'"]),
            ("tenant.limit", {"id": "tenant-0", "rate": True}, ["'rate'", "'burst'", "'in_flight'", "'deadline_us'"]),
            ("tenant.limit", {"id": "tenant-0", "token_us": 5000}, ["'tenant-0'", "classify", "'token_us'"]),
            ("domain.add", {"name": "../../etc", "version": 1}, ["../../etc/1"]),
            ("domain.delete", {"name": "root"}, ["root"]),
        ]:
            with pytest.raises(InferenceServerException, match=r"\[invalid_input\]") as refused:
                admin(command, **given)
            assert mentions(refused.value, *named)
        assert admin("tenant.list")["tenants"] == [{"id": f"tenant-{i}", "version": 1} for i in range(2)]


def test_two_servers_on_one_state_see_the_same(place):
    store, repository, state = place
    with serving(repository, state=state) as one, serving(repository, state=state) as other:
        added = Admin(one)("tenant.add", **trained(store, "acme"))
        assert added["late"] == []
        for server in (one, other):
            assert Stock(server, "http").ask([TEXT], "acme")["VERSION"][0, 0] == b"1"
        Admin(other)("tenant.delete", id="acme")
        with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
            Stock(one, "http").ask([TEXT], "acme")


class OnReadOnlyState(TritonServer):
    """Sees the state through a read-only mount of its own, like a replica with a read-only volume."""

    MOUNT = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && '

    def _command(self, folder):
        in_its_own_view = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{self.MOUNT} exec "$@"']
        return [*in_its_own_view, str(self._state), *super()._command(folder)]


def _may_mount(folder):
    """Whether the machine allows the mount that the test needs. Otherwise the test is skipped."""
    folder.mkdir()
    shell = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    tried = subprocess.run([*shell, f'{OnReadOnlyState.MOUNT} ! touch "$0/file"', str(folder)], capture_output=True, text=True)
    return tried.returncode == 0 and "Read-only" in tried.stderr


def test_a_server_on_a_read_only_mount_of_the_state_sees_the_same(place, tmp_path):
    if not _may_mount(tmp_path / "tried"):
        pytest.skip("this machine lets nobody mount in a namespace of their own")
    store, repository, state = place
    text, reader = [TEXT], tmp_path / "reader"
    shutil.copytree(repository, reader, ignore=shutil.ignore_patterns("toy-admin"))
    with serving(repository, state=state) as writer:
        Admin(writer)("tenant.add", **trained(store, "acme"))
        with OnReadOnlyState(reader, state=state) as replica:
            stock = Stock(replica, "http")
            first = stock.ask(text, "acme")
            assert np.allclose(first["LOGITS"], Stock(writer, "http").ask(text, "acme")["LOGITS"], atol=1e-5)
            changes = [("update", trained(store, "acme", 2, seed=8), b"2"), ("rollback", {"id": "acme"}, b"1")]
            for command, more, version in changes:
                assert Admin(writer)(f"tenant.{command}", **more)["late"] == []
                _until(lambda: stock.ask(text, "acme")["VERSION"][0, 0], version)
            Admin(writer)("tenant.delete", id="acme")
            with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
                _until(lambda: stock.ask(text, "acme"), None)
            assert Admin(writer)("tenant.compact")["bytes"] == 0
            stock.ask(text, "tenant-0")


def _until(asked, expected):
    """Waits here, because the manager does not wait for a reader that may not write."""
    deadline = time.monotonic() + 60
    while (answer := asked()) != expected:
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)


@pytest.mark.parametrize("key", ["", " \n"], ids=["none", "blank"])
def test_the_admin_model_needs_a_key_and_a_state(place, monkeypatch, key):
    _, repository, state = place
    monkeypatch.setenv("HPLM_ADMIN_KEY", key)
    started = time.monotonic()
    with pytest.raises(HplmError, match="HPLM_ADMIN_KEY"), TritonServer(repository, state=state):
        raise AssertionError(f"started after {time.monotonic() - started} s")
