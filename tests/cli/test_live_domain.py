"""`hplm domain` for a live state, as a user meets it."""

from dataclasses import replace

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from hplm.cli.main import main
from hplm.tenants.state import State
from testing.random_store import random_store, random_table, random_tenant, random_tenants
from testing.toy import CONFIG
from tests.cli.test_domain import broken_of, refused, run
from tests.support.message import mentions

pytestmark = pytest.mark.slow


@pytest.fixture
def served(tmp_path):
    """Four tenants of bio, exported; three of them tuned again on its second version."""
    tenants = random_tenants(4, 4, 2, domains=("bio",))
    store = random_store(tmp_path / "store", CONFIG, tenants, ("bio",), corpus_tokens=2000)
    export(store, tmp_path / "repository", ServingOptions())
    random_table(store, "bio", 2, ("root", 1), 2000, seed=9)
    for tenant in tenants[:3]:
        random_tenant(store, replace(tenant, version=2, domain_version=2), 0.1, seed=5)
    State(tmp_path / "state/toy").begin()
    places = ["--repository", str(tmp_path / "repository"), "--state", str(tmp_path / "state")]
    return ["--store", str(tmp_path / "store")], places


def test_a_served_domain_is_updated_listed_and_rolled_back(served, capsys):
    store, places = served
    first = run(capsys, "domain", "update", "--name", "bio", *store, *places, "--canary", "0.4")
    assert (len(first["moved"]), len(first["waiting"]), first["behind"]) == (1, 2, ["tenant-3"])
    rows = {(row["domain"], row["version"]): row["tenants"] for row in run(capsys, "domain", "list", *places)["domains"]}
    assert rows == {("root", 1): 0, ("bio", 1): 3, ("bio", 2): 1}
    exported = run(capsys, "domain", "list", *places[:2])["domains"]
    assert {(row["domain"], row["version"]): row["tenants"] for row in exported} == {("root", 1): 0, ("bio", 1): 4}
    assert run(capsys, "domain", "rollback", "--name", "bio", *places)["moved"] == first["moved"]
    assert main(["domain", "update", "--name", "bio", *store, *places]) == 0
    lines = capsys.readouterr().out.splitlines()
    for named in (["moved", "tenant-0", "tenant-1", "tenant-2"], ["behind", "tenant-3"]):
        assert any(mentions(line, *named) for line in lines), named


def test_a_domain_is_added_to_served_ones_and_deleted(served, capsys, tmp_path):
    store, places = served
    random_table(Store(tmp_path / "store"), "law", 1, ("root", 1), 500, seed=3)
    assert run(capsys, "domain", "add", "--name", "law", *store, *places)["generation"] == 1
    assert run(capsys, "domain", "delete", "--name", "law", *places)["generation"] == 2
    assert mentions(refused(capsys, "domain", "delete", "--name", "bio", *places), "'bio'", "tenant-0")


def test_changes_wait_for_the_servers_and_name_those_that_are_late(served, capsys, monkeypatch, tmp_path):
    store, places = served
    random_table(Store(tmp_path / "store"), "law", 1, ("root", 1), 500, seed=3)
    waited = []

    def wait(_, generation, removes=False):
        waited.append((generation, removes))
        return ["elsewhere-1-abc"]

    monkeypatch.setattr("hplm.tenants.state.State.wait_for_readers", wait)
    for action in (["update", "--name", "bio", *store], ["rollback", "--name", "bio"], ["add", "--name", "law", *store]):
        assert run(capsys, "domain", *action, *places)["late"] == ["elsewhere-1-abc"]
    assert main(["domain", "delete", "--name", "law", *places]) == 0
    assert mentions(capsys.readouterr().out, "elsewhere-1-abc")
    assert waited == [(1, False), (2, False), (3, False), (4, True)]


def test_missing_and_contradictory_options_are_refused(served, capsys):
    store, places = served
    for arguments, named in [
        (["list"], ["--store", "--repository"]),
        (["update", "--name", "bio", *store], ["--corpus", "--repository", "--state"]),
        (["rollback", "--name", "bio", *places[:2]], ["--state", "hplm serve"]),
        (["update", "--name", "bio", *store, *places, "--canary", "2"], ["canary", 2.0]),
        (["update", "--name", "bio", *store, *places, "--keep", "0.5", "--learn", "distil"], ["--keep", "--learn"]),
        (["update", "--name", "bio", *store, "--corpus", "x", "--canary", "0.5"], ["--canary"]),
        (["delete", "--name", "bio", *places, "--version", "1"], ["--version"]),
        (["delete", "--name", "bio", *store, *places[2:]], ["--state"]),
        (["list", *places[:2], "--state", "mistyped"], ["--state", "mistyped"]),
    ]:
        assert mentions(refused(capsys, "domain", *arguments), *named), arguments


def test_a_state_is_verified_with_its_registry(served, capsys, tmp_path):
    store, places = served
    run(capsys, "domain", "update", "--name", "bio", *store, *places)
    assert run(capsys, "verify", *places)["tables"] == 3
    state = tmp_path / "state/toy"
    registry = bytearray((state / "registry.sqlite").read_bytes())
    registry[100:4000] = b"\x07" * 3900
    (state / "registry.sqlite").write_bytes(registry)
    (state / "snapshots/1").write_text("{")
    broken = broken_of(refused(capsys, "verify", *places))
    assert len(broken) == 2
    for file in ("registry.sqlite", "snapshots/1"):
        assert any(mentions(line, state / file) for line in broken), file


def test_verify_refuses_a_folder_that_is_not_the_state(served, capsys, tmp_path):
    store, places = served
    run(capsys, "domain", "update", "--name", "bio", *store, *places)
    (tmp_path / "empty").mkdir()
    assert mentions(refused(capsys, "verify", *places[:2], "--state", tmp_path / "mistyped"), tmp_path / "mistyped")
    for state in ("state/toy", "empty"):
        said = refused(capsys, "verify", *places[:2], "--state", tmp_path / state)
        assert mentions(said, tmp_path / state / "toy", "registry.sqlite", "CURRENT")


def test_verify_compares_the_registry_with_the_published_generation(served, capsys, tmp_path):
    store, places = served
    run(capsys, "domain", "update", "--name", "bio", *store, *places)
    current = tmp_path / "state/toy/CURRENT"
    for content, number, named in (
        (None, 1, [1, 0, "hplm tenant", "hplm domain"]),
        ("0", 1, [1, 0, "hplm tenant", "hplm domain"]),
        ("7", 2, [1, 7]),
        ("seven", 1, []),
    ):
        current.unlink()
        if content is not None:
            current.write_text(content)
        broken = broken_of(refused(capsys, "verify", *places))
        assert len(broken) == number and any(mentions(line, current, *named) for line in broken)
        current.write_text("1\n")
    current.unlink()
    run(capsys, "domain", "rollback", "--name", "bio", *places)
    assert current.read_text() == "2\n" and run(capsys, "verify", *places)["banks"]


def test_a_state_whose_first_change_failed_is_valid(served, capsys, tmp_path):
    _, places = served
    (tmp_path / "state/toy/registry.sqlite").touch()
    assert run(capsys, "verify", *places)["tables"] == 2
