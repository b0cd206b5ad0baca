"""`hplm domain` on what is being served, as a user meets it."""

from dataclasses import replace

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from hplm.cli.main import main
from testing.random_store import random_store, random_table, random_tenant, random_tenants
from testing.toy import CONFIG
from tests.cli.test_domain import refused, run


@pytest.fixture
def served(tmp_path):
    """Four tenants of bio, exported; three of them tuned again on its second version."""
    tenants = random_tenants(4, 4, 2, domains=("bio",))
    store = random_store(tmp_path / "store", CONFIG, tenants, ("bio",), corpus_tokens=2000)
    export(store, tmp_path / "repository", ServingOptions())
    random_table(store, "bio", 2, ("root", 1), 2000, seed=9)
    for tenant in tenants[:3]:
        random_tenant(store, replace(tenant, version=2, domain_version=2), 0.1, seed=5)
    places = ["--repository", str(tmp_path / "repository"), "--state", str(tmp_path / "state")]
    return ["--store", str(tmp_path / "store")], places


def test_a_served_domain_is_updated_listed_rolled_back(served, capsys):
    store, places = served
    first = run(capsys, "domain", "update", "--name", "bio", *store, *places, "--canary", "0.4")
    assert (len(first["moved"]), len(first["waiting"]), first["behind"]) == (1, 2, ["tenant-3"])
    rows = {(row["domain"], row["version"]): row["tenants"] for row in run(capsys, "domain", "list", *places)["domains"]}
    assert rows == {("root", 1): 0, ("bio", 1): 3, ("bio", 2): 1}
    assert run(capsys, "domain", "rollback", "--name", "bio", *places)["moved"] == first["moved"]
    assert main(["domain", "update", "--name", "bio", *store, *places]) == 0
    said = capsys.readouterr().out
    assert "moved      tenant-0, tenant-1, tenant-2" in said and "behind     tenant-3" in said


def test_a_domain_is_added_to_what_is_served_and_deleted(served, capsys, tmp_path):
    store, places = served
    random_table(Store(tmp_path / "store"), "law", 1, ("root", 1), 500, seed=3)
    assert run(capsys, "domain", "add", "--name", "law", *store, *places)["generation"] == 1
    assert run(capsys, "domain", "delete", "--name", "law", *places)["generation"] == 2
    assert "in use by tenant tenant-0" in refused(capsys, "domain", "delete", "--name", "bio", *places)


def test_what_is_meant_must_be_said(served, capsys):
    store, places = served
    for arguments, message in [
        (["list"], "give --store for what has been built, or --repository"),
        (["update", "--name", "bio", *store], "give --corpus to build a version, or --repository"),
        (["list", *places[:2]], "give --state DIR, the folder that `hplm serve --state DIR` was given"),
        (["update", "--name", "bio", *store, *places, "--canary", "2"], "canary 2.0: a share above 0"),
        (["update", "--name", "bio", *store, *places, "--keep", "0.5", "--learn", "distil"], "--keep, --learn: a version is"),
        (["update", "--name", "bio", *store, "--corpus", "x", "--canary", "0.5"], "--canary: a version is built in the store"),
        (["delete", "--name", "bio", *places, "--version", "1"], "--version: what is served goes as a whole"),
        (["delete", "--name", "bio", *store, *places[2:]], "--state: of what is served"),
        (["list", *places[:2], "--state", "mistyped"], "--state mistyped is no folder"),
    ]:
        assert message in refused(capsys, "domain", *arguments)


def test_a_state_is_verified_with_its_registry(served, capsys, tmp_path):
    store, places = served
    run(capsys, "domain", "update", "--name", "bio", *store, *places)
    assert run(capsys, "verify", *places)["tables"] == 3
    state = tmp_path / "state/toy"
    registry = bytearray((state / "registry.sqlite").read_bytes())
    registry[100:4000] = b"\x07" * 3900
    (state / "registry.sqlite").write_bytes(registry)
    (state / "snapshots/1").write_text("{")
    said = refused(capsys, "verify", *places)
    assert "2 broken" in said and "registry.sqlite" in said and "snapshots/1" in said


def test_a_state_that_is_not_the_one_is_not_called_whole(served, capsys, tmp_path):
    store, places = served
    run(capsys, "domain", "update", "--name", "bio", *store, *places)
    (tmp_path / "empty").mkdir()
    assert "mistyped is no folder" in refused(capsys, "verify", *places[:2], "--state", tmp_path / "mistyped")
    for state in ("state/toy", "empty"):
        said = refused(capsys, "verify", *places[:2], "--state", tmp_path / state)
        assert f"{state} holds no live state: neither registry.sqlite nor CURRENT is in {tmp_path / state / 'toy'}" in said


def test_a_registry_and_what_is_published_are_compared(served, capsys, tmp_path):
    store, places = served
    run(capsys, "domain", "update", "--name", "bio", *store, *places)
    current = tmp_path / "state/toy/CURRENT"
    for content, broken, message in (
        (None, 1, "knows generation 1 and"),
        ("0", 1, "publishes 0: the next change with `hplm tenant` or `hplm domain` publishes the newest"),
        ("7", 2, "publishes 7: restore the state"),
        ("seven", 1, "does not hold the number of a generation"),
    ):
        current.unlink()
        if content is not None:
            current.write_text(content)
        said = refused(capsys, "verify", *places)
        assert f"{broken} broken" in said and message in said
        current.write_text("1\n")
    current.unlink()
    run(capsys, "domain", "rollback", "--name", "bio", *places)
    assert current.read_text() == "2\n" and run(capsys, "verify", *places)["banks"]


def test_a_state_whose_first_change_failed_is_whole(served, capsys, tmp_path):
    _, places = served
    (tmp_path / "state/toy").mkdir(parents=True)
    (tmp_path / "state/toy/registry.sqlite").touch()
    assert run(capsys, "verify", *places)["tables"] == 2
