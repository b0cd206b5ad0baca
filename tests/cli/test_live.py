"""`hplm tenant` and `hplm domain` for a live state, as a user meets them."""

import time
from dataclasses import replace

import pytest

from builder.store.store import TenantFile
from hplm.registry.folder import Folder
from hplm.registry.pointer import begin
from hplm.tenants import quarantine
from hplm.tenants.snapshot import LIMITS
from testing.random_store import random_tenant
from testing.toy import TENANTS, make_chat
from tests.cli.commands import printed, run
from tests.cli.conftest import ACME
from tests.support.message import mentions

pytestmark = pytest.mark.slow


def test_a_tenant_is_added_updated_rolled_back_and_deleted(live, capsys):
    store, places = live
    added = {"generation": 1, "tenant": "acme", "before": None, "after": 1, "late": []}
    assert run(capsys, "tenant", "add", "acme", *store, *places) == added
    random_tenant(live.store, replace(ACME, version=2), 0.3, seed=2)
    assert run(capsys, "tenant", "update", "acme", *store, *places)["after"] == 2
    assert run(capsys, "tenant", "rollback", "acme", *places)["after"] == 1
    listed = {tenant["id"]: tenant for tenant in run(capsys, "tenant", "list", *places)["tenants"]}
    exported = {tenant["id"] for tenant in run(capsys, "tenant", "list", *places[:2])["tenants"]}
    assert listed.keys() == exported | {"acme"} and listed["acme"]["version"] == 1
    assert run(capsys, "tenant", "delete", "acme", *places)["after"] is None
    assert run(capsys, "tenant", "compact", *places)["bytes"] == 0  # requests in flight may need them for a minute
    actions = [change["action"] for change in run(capsys, "tenant", "log", *places)["changes"]]
    assert actions == ["tenant add", "tenant update", "tenant rollback", "tenant delete"]


def test_keys_are_shown_once_and_limits_are_kept(live, capsys):
    _, places = live
    first = run(capsys, "tenant", "key", "add", "tenant-0", "--days", 1, *places)
    second = run(capsys, "tenant", "key", "add", "tenant-0", *places)
    assert first["secret"].startswith("hplm_") and first["expires"] > 0 == second["expires"]
    keys = run(capsys, "tenant", "key", "list", "tenant-0", *places)["keys"]
    assert [key["id"] for key in keys] == [first["key"], second["key"]]
    run(capsys, "tenant", "key", "revoke", "tenant-0", "--key", first["key"], *places)
    run(capsys, "tenant", "limit", "tenant-0", "--rate", 5, "--texts-rate", 60, "--tokens-rate", 7000, *places)
    run(capsys, "tenant", "limit", "tenant-0", "--in-flight", 2, "--homes", 3, "--deadline-ms", 50, *places)
    shown = run(capsys, "tenant", "show", "tenant-0", *places)
    limits = {"rate": 5, "burst": 0, "texts_rate": 60, "tokens_rate": 7000, "in_flight": 2, "deadline_us": 50000}
    assert {name: shown[name] for name in LIMITS} == {**limits, "first_token_us": 0, "token_us": 0} and shown["homes"] == 3
    assert "3 homes" in printed(capsys, "tenant", "list", *places)
    log = printed(capsys, "tenant", "log", *places)
    assert not any(secret in str(shown) + log for secret in (first["secret"], second["secret"]))


def test_a_tenant_that_generates_has_times_for_its_tokens(tmp_path, capsys):
    chat = make_chat(tmp_path, [TenantFile("luna", 1, "root", 1, "generate", [], 0)])
    places = ["--repository", chat.repository, "--state", tmp_path / "state"]
    begin(Folder(tmp_path / "state/chat"))
    set = run(capsys, "tenant", "limit", "luna", "--first-token-ms", 800, "--token-ms", 0.5, *places)
    assert (set["first_token_us"], set["token_us"]) == (800_000, 500)
    assert run(capsys, "tenant", "show", "luna", *places)["token_us"] == 500


def test_tenants_are_listed_with_their_facts_and_released_from_quarantine(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quarantine, "FOLDER", tmp_path)
    of_toy, places = quarantine.Quarantine(toy.repository / "toy"), ("--repository", toy.repository)
    of_toy.put("acme")
    listed = run(capsys, "tenant", "list", *places)["tenants"]
    assert [tenant["id"] for tenant in listed] == [tenant.id for tenant in TENANTS]
    facts = {"id": "acme", "backbone": "toy", "domain": "bio", "task": "classify", "labels": ["red", "grün", "blue"]}
    assert listed[0].items() >= {**facts, "homes": 1, "open": True, "quarantined": True}.items()
    assert [tenant["id"] for tenant in listed if tenant["quarantined"]] == ["acme"]
    assert run(capsys, "tenant", "release", "acme", *places) == {"tenant": "acme", "backbones": ["toy"]}
    of_toy.put("beta")
    assert of_toy.tenants(time.time() + quarantine.SECONDS - 60) == {"beta"}
    assert of_toy.tenants(time.time() + quarantine.SECONDS) == frozenset()  # an hour later
    assert not list(tmp_path.iterdir())


def test_changes_wait_for_the_servers_and_name_those_that_are_late(live, capsys, monkeypatch):
    """A secret is printed before, because nobody can read it later; that a key is revoked is said after."""
    store, places = live
    kept = run(capsys, "tenant", "key", "add", "tenant-0", *places)["key"]
    waited, said_before = [], []

    def wait(_, generation):
        waited.append(generation)
        said_before.append(capsys.readouterr().out)
        return ["elsewhere-1-abc"]

    monkeypatch.setattr("hplm.tenants.state.State.wait_for_readers", wait)
    assert mentions(printed(capsys, "tenant", "key", "add", "tenant-0", *places), "elsewhere-1-abc")
    assert "hplm_" in said_before[-1]
    assert mentions(printed(capsys, "tenant", "key", "revoke", "tenant-0", "--key", kept, *places), kept, "elsewhere-1-abc")
    assert said_before[-1] == ""
    for action in (["update", "--name", "bio", *store], ["rollback", "--name", "bio"], ["add", "--name", "law", *store]):
        assert run(capsys, "domain", *action, *places)["late"] == ["elsewhere-1-abc"]
    assert mentions(printed(capsys, "domain", "delete", "--name", "law", *places), "elsewhere-1-abc")
    assert waited == [2, 3, 4, 5, 6, 7]


def test_a_served_domain_is_updated_listed_and_rolled_back(live, capsys):
    store, places = live
    first = run(capsys, "domain", "update", "--name", "bio", *store, *places, "--canary", "0.4")
    assert (len(first["moved"]), len(first["waiting"]), first["behind"]) == (1, 2, ["tenant-3"])
    for of, expected in ((places, {("bio", 1): 3, ("bio", 2): 1}), (places[:2], {("bio", 1): 4})):
        rows = run(capsys, "domain", "list", *of)["domains"]
        assert {(row["domain"], row["version"]): row["tenants"] for row in rows} == {("root", 1): 0, **expected}
    assert run(capsys, "domain", "rollback", "--name", "bio", *places)["moved"] == first["moved"]
    lines = printed(capsys, "domain", "update", "--name", "bio", *store, *places).splitlines()
    for named in (["moved", "tenant-0", "tenant-1", "tenant-2"], ["behind", "tenant-3"]):
        assert any(mentions(line, *named) for line in lines), named
    assert run(capsys, "domain", "add", "--name", "law", *store, *places)["generation"] == 4
    assert run(capsys, "domain", "delete", "--name", "law", *places)["generation"] == 5
