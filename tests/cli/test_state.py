"""`hplm begin`, `hplm backup` and `hplm restore`: a restored state gives the answers of the saved one."""

import shutil
from dataclasses import replace

import pytest
import torch

from builder.publish.export import export
from builder.publish.live import add_domain, add_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from hplm.registry.store import Absent
from hplm.tenants.backup import back_up
from hplm.tenants.manager import Manager
from testing.random_store import random_store, random_tenants
from testing.reference import Reference
from testing.toy import CONFIG, WORDS
from tests.builder.stores import full_disk
from tests.cli.commands import refused, run
from tests.support.faulty_folder import FaultyFolder
from tests.support.message import mentions, refusing

pytestmark = pytest.mark.slow


def test_a_state_is_begun_once_also_if_it_has_lost_current_and_is_saved_before_its_first_change(live, capsys):
    (_, places), folder = live, live.folder / "state/toy"
    shutil.rmtree(live.folder / "state")
    assert run(capsys, "begin", *places) == {"begun": ["toy"]}
    assert run(capsys, "tenant", "log", *places) == {"changes": []}
    assert run(capsys, "backup", "--to", live.folder / "saved", *places)["generation"] == 0
    assert run(capsys, "restore", "--from", live.folder / "saved", *places)["generation"] == 1
    live.manager.add_key("tenant-0")
    run(capsys, "backup", "--to", live.folder / "later", *places)
    assert mentions(refused(capsys, "begin", *places), live.folder / "state", "toy")
    (folder / "CURRENT").unlink()
    for command in (["begin"], ["tenant", "compact"], ["tenant", "list"], ["tenant", "log"]):
        assert mentions(refused(capsys, *command, *places), folder, "CURRENT"), command
    run(capsys, "restore", "--from", live.folder / "later", *places)
    assert live.manager.current().find("tenant-0").keys


def test_of_several_backbones_with_a_tenant_one_has_to_be_named(live, capsys, tmp_path):
    repository = live.folder / "repository"
    other = random_store(tmp_path / "other", replace(CONFIG, name="other"), random_tenants(1, 4, 2))
    export(other, repository, ServingOptions())
    for command in (["tenant", "show", "tenant-0"], ["tenant", "key", "list", "tenant-0"]):
        said = refused(capsys, *command, "--repository", repository)
        assert mentions(said, "'tenant-0'", "toy", "other", "--backbone"), command
    shown = run(capsys, "tenant", "show", "tenant-0", "--repository", repository, "--backbone", "other")
    assert shown["backbone"] == "other"


@pytest.fixture
def changed(live):
    """The options of the repository, and of the state, in which law and acme were added."""
    add_domain(live.manager, live.store, "law")
    add_tenant(live.manager, live.store, "acme")
    return live.folder, [*live][1]


def answers(folder, state):
    reference = Reference.open(folder / "repository/toy/1", folder / state)
    return torch.cat([reference.forward(" ".join(WORDS[:9]), name).flatten() for name in ("acme", "tenant-0")])


def test_a_restored_state_answers_like_the_saved_one(changed, capsys):
    folder, places = changed
    before = answers(folder, "state")
    assert run(capsys, "backup", "--to", folder / "saved", *places)["generation"] == 2
    live = Manager.open(folder / "repository", folder / "state")
    live.delete("acme")
    live.delete_domain("law")
    for state, generation in (("state", 5), ("again", 1)):
        own = [*places[:3], folder / state]
        found = run(capsys, "restore", "--from", folder / "saved", *own)
        assert (found["backed_up"], found["generation"]) == (2, generation)
        assert torch.equal(answers(folder, state), before)
        assert run(capsys, "verify", *own)["records"] > 2
        live = Manager.open(folder / "repository", folder / state)
        assert live.registry.audit()[-1]["action"] == "restore"
        assert live.delete("acme").generation == generation + 1


def test_what_was_used_since_a_backup_is_not_used_again_after_its_restore(changed, capsys):
    """Servers go on meanwhile: their slots and tickets name uids, addresses and versions."""
    folder, places = changed
    run(capsys, "backup", "--to", folder / "saved", *places)
    live, store = Manager.open(folder / "repository", folder / "state"), Store(folder / "store")
    before, own = live.current(), store.knowledge(store.tenant("acme"))
    live.update("acme", own)
    live.update("acme", own)
    live.add("newer", own)
    newest = live.current()
    run(capsys, "restore", "--from", folder / "saved", *places)
    assert live.current().tenants == before.tenants and live.current().branches == before.branches
    assert live.current().generation == newest.generation + 1
    assert live.update("acme", own).after == newest.find("acme").version + 1
    assert live.add("newer", own) and live.current().find("newer").uid > newest.find("newer").uid


@pytest.mark.parametrize("removed", [1, 9])
def test_a_backup_that_meets_changes_is_one_of_the_newest_generation(changed, removed):
    """Objects that are gone when they are copied belonged to an older one, unless that is so again and again."""
    (folder, _), calls = changed, []

    def gone_at_first(name):
        if name.startswith("plot/law") and len(calls) < removed:
            calls.append(name)
            raise Absent(f"{name} is missing")

    manager = Manager.open(folder / "repository", folder / "state")
    manager.registry.store = FaultyFolder(folder / "state/toy", gone_at_first)
    if removed == 1:
        assert back_up(manager, folder / "saved")["generation"] == 2
        return
    with refusing(Absent) as refusals:
        back_up(manager, folder / "saved")
    assert mentions(refusals[0], calls[0]) and not (folder / "saved").exists()


def test_a_small_disk_is_refused_before_anything_is_written(changed, capsys):
    folder, places = changed
    run(capsys, "backup", "--to", folder / "saved", *places)
    before = {path for path in folder.rglob("*") if path.is_file()}
    with full_disk():
        for command in (["backup", "--to", folder / "again", *places], ["restore", "--from", folder / "saved", *places]):
            assert mentions(refused(capsys, *command), "GB", "free")
    assert {path for path in folder.rglob("*") if path.is_file() and ".writing" not in str(path)} == before
