"""`hplm tenant` for a live state, as a user meets it."""

from dataclasses import replace

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, TenantFile
from hplm.cli.main import main
from hplm.tenants.snapshot import LIMITS
from hplm.tenants.state import State
from testing.random_store import random_store, random_tenant, random_tenants
from testing.toy import CONFIG, make_chat
from tests.cli.test_domain import refused, run
from tests.support.message import mentions

pytestmark = pytest.mark.slow


@pytest.fixture
def served(tmp_path):
    store = random_store(tmp_path / "store", CONFIG, random_tenants(2, 4, 2), corpus_tokens=1000)
    export(store, tmp_path / "repository", ServingOptions())
    random_tenant(store, TenantFile("acme", 1, "root", 1, "classify", ["x", "y"], 4), 0.3, seed=1)
    State(tmp_path / "state/toy").begin()
    return ["--store", tmp_path / "store"], ["--repository", tmp_path / "repository", "--state", tmp_path / "state"]


def test_a_tenant_is_added_updated_rolled_back_and_deleted(served, capsys, tmp_path):
    store, places = served
    assert run(capsys, "tenant", "add", "acme", *store, *places) == {
        "generation": 1,
        "tenant": "acme",
        "before": None,
        "after": 1,
        "late": [],
    }
    known = Store(tmp_path / "store").tenants()[0]
    random_tenant(Store(tmp_path / "store"), replace(known, version=2), 0.3, seed=2)
    assert run(capsys, "tenant", "update", "acme", *store, *places)["after"] == 2
    assert run(capsys, "tenant", "rollback", "acme", *places)["after"] == 1
    listed = {tenant["id"]: tenant for tenant in run(capsys, "tenant", "list", *places)["tenants"]}
    assert sorted(listed) == ["acme", "tenant-0", "tenant-1"] and listed["acme"]["version"] == 1
    assert sorted(tenant["id"] for tenant in run(capsys, "tenant", "list", *places[:2])["tenants"]) == ["tenant-0", "tenant-1"]
    assert run(capsys, "tenant", "delete", "acme", *places)["after"] is None
    assert not list((tmp_path / "state/toy/adapters").iterdir())  # a bank without records in use is removed at once
    assert run(capsys, "tenant", "compact", *places)["bytes"] == 0
    actions = [change["action"] for change in run(capsys, "tenant", "log", *places)["changes"]]
    assert actions == ["tenant add", "tenant update", "tenant rollback", "tenant delete", "compact"]


def test_keys_are_shown_once_and_limits_are_kept(served, capsys):
    _, places = served
    first = run(capsys, "tenant", "key", "add", "tenant-0", "--days", 1, *places)
    second = run(capsys, "tenant", "key", "add", "tenant-0", *places)
    assert first["secret"].startswith("hplm_") and first["expires"] > 0 == second["expires"]
    keys = run(capsys, "tenant", "key", "list", "tenant-0", *places)["keys"]
    assert [key["id"] for key in keys] == [first["key"], second["key"]]
    run(capsys, "tenant", "key", "revoke", "tenant-0", "--key", first["key"], *places)
    said = refused(capsys, "tenant", "key", "revoke", "tenant-0", "--key", second["key"], *places)
    assert mentions(said, "'tenant-0'", f"'{second['key']}'")
    run(capsys, "tenant", "limit", "tenant-0", "--rate", 5, "--texts-rate", 60, "--tokens-rate", 7000, *places)
    run(capsys, "tenant", "limit", "tenant-0", "--in-flight", 2, "--homes", 3, "--deadline-ms", 50, *places)
    shown = run(capsys, "tenant", "show", "tenant-0", *places)
    limits = {"rate": 5, "burst": 0, "texts_rate": 60, "tokens_rate": 7000, "in_flight": 2, "deadline_us": 50000}
    assert {name: shown[name] for name in LIMITS} == {**limits, "first_token_us": 0, "token_us": 0} and shown["homes"] == 3
    assert {row["id"]: row["homes"] for row in run(capsys, "tenant", "list", *places)["tenants"]}["tenant-0"] == 3
    assert main(["tenant", "list", *map(str, places)]) == 0 and "3 homes" in capsys.readouterr().out
    for secret in (first["secret"], second["secret"]):
        assert secret not in str(shown) and main(["tenant", "log", *map(str, places)]) == 0
        assert secret not in capsys.readouterr().out


def test_a_tenant_that_generates_has_times_for_its_tokens(tmp_path, capsys):
    chat = make_chat(tmp_path, [TenantFile("luna", 1, "root", 1, "generate", [], 0)])
    places = ["--repository", chat.repository, "--state", tmp_path / "state"]
    State(tmp_path / "state/chat").begin()
    set = run(capsys, "tenant", "limit", "luna", "--first-token-ms", 800, "--token-ms", 0.5, *places)
    assert (set["first_token_us"], set["token_us"]) == (800_000, 500)
    run(capsys, "tenant", "limit", "luna", "--token-ms", 0, *places)
    shown = run(capsys, "tenant", "show", "luna", *places)
    assert (shown["first_token_us"], shown["token_us"], shown["deadline_us"]) == (800_000, 0, 0)


def test_a_secret_is_printed_before_waiting_for_servers_and_a_revocation_after(served, capsys, monkeypatch):
    _, places = served
    kept = run(capsys, "tenant", "key", "add", "tenant-0", *places)["key"]
    said_before = []

    def wait(state, generation, removes=False):
        said_before.append(capsys.readouterr().out)
        return ["elsewhere-1-abc"]

    monkeypatch.setattr("hplm.tenants.state.State.wait_for_readers", wait)
    assert main(["tenant", "key", "add", "tenant-0", *map(str, places)]) == 0
    assert "hplm_" in said_before[-1] and mentions(capsys.readouterr().out, "elsewhere-1-abc")
    assert main(["tenant", "key", "revoke", "tenant-0", "--key", kept, *map(str, places)]) == 0
    said = capsys.readouterr().out
    assert said_before[-1] == "" and mentions(said, kept, "tenant-0", "elsewhere-1-abc")


def test_impossible_changes_are_refused(served, capsys, tmp_path):
    store, places = served
    for arguments, named in [
        (["add", "nobody", *store, *places], ["'nobody'", tmp_path / "store"]),
        (["add", "tenant-0", *store, *places], ["'tenant-0'", "hplm tenant update"]),
        (["delete", "nobody", *places], ["'nobody'", "hplm tenant list"]),
        (["delete", "tenant-0", *places[:2]], ["--state", "hplm serve"]),
        (["limit", "tenant-0", *places], ["--rate", "--burst", "--texts-rate", "--tokens-rate"]),
        (["limit", "tenant-0", "--rate", -1, *places], ["'rate'"]),
        (["limit", "tenant-0", "--rate", "nan", *places], ["'rate'"]),
        (["limit", "tenant-0", "--burst", "inf", *places], ["'burst'"]),
        (["limit", "tenant-0", "--texts-rate", -1, *places], ["'texts_rate'"]),
        (["limit", "tenant-0", "--tokens-rate", "1e13", *places], ["'tokens_rate'", "1,000,000,000,000"]),
        (["limit", "tenant-0", "--homes", 0, *places], ["'homes'", 0]),
        (["limit", "tenant-0", "--homes", -1, *places], ["'homes'"]),
        (["limit", "tenant-0", "--deadline-ms", "nan", *places], ["'deadline_us'"]),
        (["limit", "tenant-0", "--deadline-ms", "inf", *places], ["'deadline_us'"]),
        (["limit", "tenant-0", "--deadline-ms", "1e306", *places], ["'deadline_us'"]),
        (["limit", "tenant-0", "--first-token-ms", 50, *places], ["'tenant-0'", "classify", "'first_token_us'"]),
        (["limit", "tenant-0", "--token-ms", 50, *places], ["'tenant-0'", "classify", "'token_us'"]),
        (["key", "add", "tenant-0", "--days", -1, *places], ["'days'", -1.0]),
        (["key", "add", "tenant-0", "--days", "nan", *places], ["'days'", "nan"]),
        (["key", "add", "tenant-0", "--days", "inf", *places], ["'days'", "inf"]),
    ]:
        assert mentions(refused(capsys, "tenant", *arguments), *named), arguments
