"""`hplm begin`, `backup` and `restore`: a restored state answers as the saved one. `hplm verify` names what is broken."""

import itertools
import json
import shutil
import time
from dataclasses import replace

import pytest
import torch

from builder.publish.export import export
from builder.publish.live import add_domain, add_tenant, update_domain
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, TenantVersion
from hplm.calibration import Calibration
from hplm.doctor import checks
from hplm.location import location_of
from hplm.model.weights import load_weights, save_weights
from hplm.registry.opening import opened
from hplm.registry.pointer import begin
from hplm.registry.store import Absent
from hplm.tenants.backup import LOST, back_up
from hplm.tenants.keys import new_key
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot
from testing.bucket import bucket
from testing.random_store import change_version, random_store, random_tenant, random_tenants
from testing.reference import Reference
from testing.toy import CONFIG, WORDS
from tests.builder.stores import full_disk
from tests.cli.commands import expect_broken, flip, printed, refused, run
from tests.support.faulty_folder import FaultyFolder
from tests.support.message import mentions, refusing

pytestmark = pytest.mark.slow


def test_a_state_is_begun_once_also_if_it_has_lost_current_and_is_saved_before_its_first_change(live, capsys):
    (_, places), folder = live, live.folder / "state/toy"
    shutil.rmtree(live.folder / "state")
    assert run(capsys, "begin", *places) == {"begun": ["toy"], "leased": []}
    assert run(capsys, "tenant", "log", *places) == {"changes": []}
    assert run(capsys, "backup", "--to", live.folder / "saved", *places)["generation"] == 0
    assert run(capsys, "restore", "--from", live.folder / "saved", *places)["generation"] == 1
    live.manager.add_key("tenant-0")
    run(capsys, "backup", "--to", live.folder / "later", *places)
    assert mentions(refused(capsys, "begin", *places), live.folder / "state", "toy")
    (folder / "CURRENT").unlink()
    for command in (["begin"], ["tenant", "compact"], ["tenant", "list"], ["tenant", "log"]):
        assert mentions(refused(capsys, *command, *places), folder, "CURRENT"), command
    assert run(capsys, "restore", "--from", live.folder / "later", *places)["generation"] == 3  # servers have the second one
    assert live.manager.current().find("tenant-0").keys and live.manager.registry.audit()[0]["action"] == "restore"


def test_commands_read_the_variable_and_say_where_they_show_the_export(live, capsys, monkeypatch, tmp_path):
    repository, state = ["--repository", live.folder / "repository"], live.folder / "state"
    live.manager.add_key("tenant-0", days=1)
    listing = (["tenant", "list"], ["tenant", "show", "tenant-0"], ["tenant", "key", "list", "tenant-0"], ["domain", "list"])
    for named, (value, expected) in itertools.product(listing, ((None, None), ("", None), (state, str(state)))):
        monkeypatch.delenv("HPLM_STATE", raising=False)
        if value is not None:
            monkeypatch.setenv("HPLM_STATE", str(value))
        assert ("as exported" in printed(capsys, *named, *repository)) == (expected is None), named
        assert run(capsys, *named, *repository)["state"] == expected
    assert run(capsys, "tenant", "limit", "tenant-0", "--rate", 2.5, *repository)["rate"] == 2.5
    for place in (None, state):
        assert ("as exported" in checks.tenants(repository[1], place, is_open=False).says) == (place is None)
    zone = time.strftime("%z")
    shown = printed(capsys, "tenant", "show", "tenant-0", *repository)
    assert mentions(shown, "expires", zone) and "'" not in shown
    said = printed(capsys, "tenant", "log", *repository)
    assert mentions(said, "tenant tenant-0", "rate 2.5", zone) and "{" not in said
    monkeypatch.setenv("HPLM_STATE", str(tmp_path / "none"))
    assert mentions(refused(capsys, "tenant", "list", *repository), "HPLM_STATE", tmp_path / "none")
    assert "with keys" in printed(capsys, "tenant", "list", *repository, "--state", state)  # the option counts


def test_the_lease_of_a_live_state_is_changed_and_a_revoked_key_waits_for_servers_that_know_the_longer_one(live, capsys):
    (_, places), keys = live, [live.manager.add_key("tenant-0")[1] for _ in range(3)]

    def dead_in(key):
        return live.manager.revoke_key("tenant-0", key.id) - time.time()

    assert run(capsys, "begin", "--lease", 2000, *places) == {"begun": [], "leased": ["toy"]}
    assert 1990 < dead_in(keys[0]) <= 2000
    assert mentions(printed(capsys, "begin", "--lease", 5, *places), "5 s", "toy")
    assert live.manager.registry.pointer().lease_s == 5 and 1980 < dead_in(keys[1]) <= 2000
    assert mentions(printed(capsys, "tenant", "log", *places), "lease", "seconds 5")
    assert mentions(refused(capsys, "begin", "--lease", 5, *places), live.folder / "state", "toy")


def test_the_registry_of_a_new_export_begins_from_another_one(live, capsys):
    places, new = [*live][1], ["--repository", live.folder / "new", "--state", live.folder / "next"]
    source = ["--from", live.folder / "state", "--from-repository", live.folder / "repository"]
    key = live.manager.add_key("tenant-0")[1]
    export(live.store, live.folder / "new", ServingOptions())
    assert mentions(refused(capsys, "begin", *new, *source[:2]), "--from-repository")
    found = run(capsys, "begin", *new, *source)
    assert found["begun"] == ["toy"] and "tenant-0" in found["taken"]["toy"]["kept"]
    assert found["taken"]["toy"]["left_out"] == ["acme"]  # only the store has it
    assert mentions(printed(capsys, "tenant", "key", "list", "tenant-0", *new), key.id)
    assert mentions(refused(capsys, "begin", *new, *source), live.folder / "next", "nothing was changed")
    shutil.rmtree(live.folder / "next")
    assert mentions(printed(capsys, "begin", *new, *source), "acme", "hplm tenant publish")
    assert mentions(refused(capsys, "tenant", "list", *new[:2], *places[2:]), "another export", "hplm begin --from")


def test_of_several_backbones_with_a_tenant_one_has_to_be_named(live, capsys, tmp_path):
    for command in (["tenant", "list"], ["domain", "list"]):
        assert mentions(refused(capsys, *command, "--repository", tmp_path), tmp_path, "hplm export", "--repository"), command
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
    for state, generation in (("state", 5), ("again", 2 + LOST)):  # servers may have taken changes since the backup
        own = [*places[:3], folder / state]
        assert mentions(refused(capsys, "restore", "--from", folder / "saved", *own), "acme", "--accept-old-keys")
        found = run(capsys, "restore", "--from", folder / "saved", *own, "--accept-old-keys")
        assert (found["backed_up"], found["generation"]) == (2, generation)
        assert torch.equal(answers(folder, state), before)
        assert run(capsys, "verify", *own)["records"] > 2
        live = Manager.open(folder / "repository", folder / state)
        assert live.registry.audit()[-1]["action"] == "restore"
        assert live.delete("acme").generation == generation + 1
    (record,) = (folder / "saved/records").iterdir()
    record.unlink()
    said = refused(capsys, "restore", "--from", folder / "saved", *places, "--accept-old-keys")
    assert mentions(said, folder / "saved", f"records/{record.name}")


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


def test_a_restore_names_what_it_undoes_and_needs_a_word_to_give_access(changed, capsys):
    folder, places = changed
    live = Manager.open(folder / "repository", folder / "state")
    (revoked, kept), dead = (live.add_key("tenant-1")[1] for _ in range(2)), new_key(expires=1)[1]

    def add_dead(change):
        tenant = change.tenants["tenant-1"]
        change.tenants["tenant-1"] = replace(tenant, keys=(*tenant.keys, dead))

    live.registry.change("tenant key add", add_dead)
    restore = ["restore", "--from", folder / "saved", *places]
    run(capsys, "backup", "--to", folder / "saved", *places)
    for key in (revoked, dead):
        live.revoke_key("tenant-1", key.id)
    live.add_key("tenant-0")
    swept = {folder / "state/toy/records" / record.file for record in live.current().find("acme").records()}
    live.delete("acme")
    for path in swept:
        path.unlink()
    before = live.current()
    said = refused(capsys, *restore)
    assert not any(path.exists() for path in swept), "a refused restore has copied them"
    assert mentions(said, "tenant-0", revoked.id, "--accept-old-keys") and kept.id not in said and dead.id not in said
    assert live.current().generation == before.generation
    said = printed(capsys, *restore, "--accept-old-keys")
    assert mentions(said, "tenant-0", f"{revoked.id} of tenant-1", "acme") and "tenant-2" not in said
    assert mentions(printed(capsys, "tenant", "key", "list", "tenant-1", *places), f"{dead.id}  expired")
    assert run(capsys, *restore).items() >= {"opened": [], "revived": [], "returned": []}.items()


def test_the_keys_of_a_deleted_tenant_and_an_open_one_that_had_keys_later_do_not_come_back_by_themselves(live, capsys):
    _, places = live
    revoked = live.manager.add_key("tenant-0")[1]
    live.manager.add_key("tenant-0")
    restore = ["restore", "--from", live.folder / "saved", *places]
    run(capsys, "backup", "--to", live.folder / "saved", *places)
    live.manager.revoke_key("tenant-0", revoked.id)
    live.manager.add_key("tenant-1")
    for name in ("tenant-0", "tenant-1"):
        live.manager.delete(name)
    before = live.manager.current().generation
    assert mentions(refused(capsys, *restore), "tenant-0", "tenant-1", "--accept-old-keys")
    (live.folder / "state/toy/CURRENT").unlink()  # the newest snapshot still tells it
    said = refused(capsys, *restore)
    assert mentions(said, "tenant-0, tenant-1)", "--accept-old-keys") and "tenant-2" not in said
    assert run(capsys, *restore, "--accept-old-keys").items() >= {"generation": before + 1, "opened": [], "revived": []}.items()
    assert run(capsys, *restore).items() >= {"generation": before + 2, "returned": []}.items()


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
    with refusing(Absent) as refused:
        back_up(manager, folder / "saved")
    assert mentions(refused.value, calls[0]) and not (folder / "saved").exists()


def test_a_small_disk_is_refused_before_anything_is_written(changed, capsys):
    folder, places = changed
    run(capsys, "backup", "--to", folder / "saved", *places)
    before = {path for path in folder.rglob("*")}
    with full_disk():
        for command in (["backup", "--to", folder / "again", *places], ["restore", "--from", folder / "saved", *places]):
            assert mentions(refused(capsys, *command), "1,000 bytes", "free")
    assert {path for path in folder.rglob("*")} == before


def test_undamaged_files_are_verified(toy, grown, capsys):
    found = run(capsys, "verify", "--repository", toy.repository)
    assert found["tables"] == 3 and found["records"] > 2
    records = f"{len(toy.store.tenants())} records"
    assert mentions(printed(capsys, "verify", "--store", toy.store.folder), "ok", "3 tables", records)
    assert run(capsys, "verify", "--store", grown.folder)["tables"] == 4
    random_tenant(grown, TenantVersion("acme", 2, "bio", 2, "classify", ["a", "b"], 0), 0.3, seed=1)
    grown.remove_branch("bio", 1)  # of an old version of a tenant
    assert run(capsys, "verify", "--store", grown.folder)["tables"] == 3


def test_a_bucket_is_verified_as_a_folder_is(live, capsys, monkeypatch):
    """Of a served bucket the doctor sees the tenants."""
    place, repository = location_of("s3://bucket/hplm"), ["--repository", live.folder / "repository"]
    with bucket():
        monkeypatch.setenv("HPLM_STATE", str(place))
        assert mentions(refused(capsys, "verify", *repository), place, "CURRENT")
        begin(opened(place / "toy"))
        manager = Manager.open(live.folder / "repository", place)
        add_domain(manager, live.store, "law")
        add_tenant(manager, live.store, "acme")
        exported = run(capsys, "verify", "--repository", live.folder / "repository", "--state", live.folder / "state")
        found = run(capsys, "verify", *repository, "--state", place)
        assert (found["tables"], found["records"]) == (exported["tables"] + 1, exported["records"] + 1)
        assert f"{len(manager.current().tenants)} of" in checks.tenants(live.folder / "repository", place, False).says
        store, record = manager.registry.store, manager.current().find("acme").head.file
        store.delete([f"records/{record}"])
        store.put(f"records/{record}", b"damaged")
        said = refused(capsys, "verify", *repository)
        assert mentions(said, f"record {place}/toy/records/{record}", "checksum") and "hplm-verify" not in said


def test_everything_that_is_broken_in_an_export_is_named(toy, tmp_path, capsys):
    repository = shutil.copytree(toy.repository, tmp_path / "repository")
    folder = repository / "toy" / "1"
    row = json.loads((folder / "plot/bio/1/meta.json").read_text())["hidden"] * 3 * 2
    for number in (5, 9):
        flip(folder / "plot/bio/1/values", number * row + 7)
    flip(folder / "plot/law/1/keys", 3)
    snapshot = Snapshot.load(folder / "tenants.json")
    adapter, head = snapshot.find("acme").adapter, snapshot.find("city").head
    flip(folder / "records" / adapter.file, adapter.offset + 5)
    (folder / "records" / head.file).unlink()
    (folder / "upper.safetensors").write_bytes((folder / "upper.safetensors").read_bytes()[:-1])
    expect_broken(
        refused(capsys, "verify", "--repository", repository),
        [folder / "plot/bio/1", 5, 9, "values"],
        [folder / "plot/law/1/keys"],
        [folder / "records" / adapter.file, "checksum"],
        ["acme", adapter.file],
        *[["city", head.file]] * len(snapshot.find("city").records()),
        [folder / "upper.safetensors"],
    )


def test_all_damaged_files_of_a_store_are_named(grown, capsys):
    table, root = grown.table_folder("bio", 1), grown.table_folder("root", 1)
    (table / "values").write_bytes((table / "values").read_bytes()[:-1])
    flip(root / "values", 5000)
    counts = grown.counts_folder("bio", 2) / "keys-0"
    counts.write_bytes(counts.read_bytes()[:-8])
    (head,) = grown.tenant_folder("acme", 1).glob("*.safetensors")
    head.write_bytes(b"")
    flip(grown.folder / "upper.safetensors", -5)
    random_tenant(grown, TenantVersion("many", 1, "root", 1, "classify", ["a", "b", "c"], 4), 0.3, seed=1)
    change_version(grown, grown.tenant("many"), calibration=Calibration(temperature=-1.0))
    broken = [table / "values", root, counts.parent, head, grown.folder / "upper.safetensors"]
    said = refused(capsys, "verify", "--store", grown.folder)
    expect_broken(said, *([path] for path in broken), ["many/1", "temperature"])


def test_weights_with_nan_are_named(grown, capsys):
    """Their checksum fits: the model that was split had them."""
    path = grown.folder / "upper.safetensors"
    weights = load_weights(path)
    name, tensor = next(iter(weights.items()))
    tensor.view(-1)[0] = torch.nan
    save_weights(weights, path)
    expect_broken(refused(capsys, "verify", "--store", grown.folder), [path, name])


def test_files_that_a_store_has_lost_are_named(grown, capsys):
    random_tenant(grown, TenantVersion("rich", 1, "root", 1, "classify", ["a", "b"], 4), 0.3, seed=1)
    lost = [
        next(grown.tenant_folder("rich", 1).glob("*.safetensors")),
        grown.tenant_folder("acme", 1) / "report.json",
        grown.table_folder("root", 1) / "meta.json",
    ]
    for path in lost:
        path.unlink()
    for version in (1, 2):
        shutil.rmtree(grown.table_folder("bio", version))
    expect_broken(
        refused(capsys, "verify", "--store", grown.folder),
        ["rich", lost[0].parent],
        [lost[1]],
        [lost[2].parent, "meta.json"],
        ["acme", grown.table_folder("bio", 1)],
        [grown.table_folder("cells", 1), grown.table_folder("bio", 2)],
    )


def test_what_is_broken_in_a_state_is_named(live, capsys):
    """Its folder's name has characters with a meaning in a URI. The first change was one of a domain."""
    update_domain(live.manager, live.store, "bio")
    store, places = live
    run(capsys, "tenant", "add", "acme", *store, *places)
    state = live.folder / "live#1?"
    shutil.move(live.folder / "state", state)
    places = [*places[:3], state]
    found = run(capsys, "verify", *places)
    assert found["tables"] == 3 and found["records"] > 2
    record = next((state / "toy/records").iterdir())
    flip(record, 0)
    assert mentions(refused(capsys, "verify", *places), record, "hplm restore")
    flip(record, 0)
    snapshot = max((state / "toy/snapshots").iterdir())
    for damage in (lambda: snapshot.write_text("{"), snapshot.unlink):
        damage()
        expect_broken(refused(capsys, "verify", *places), [snapshot, "restore"])
    for content in ("seven", "7", "{}"):
        (state / "toy/CURRENT").write_text(content)
        expect_broken(refused(capsys, "verify", *places), [state / "toy/CURRENT"])
