"""A store and a live state of the release before go on in this one. Its export and its state are refused with a way out.

Commit d000af2 made them, by a script: `git show 9ff655cd:tests/fixtures/before/make.py`.
"""

import json
import logging
import random
import shutil
import sqlite3
import tarfile
import time
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.learning.limits import Budget
from builder.publish.export import export
from builder.publish.live import update_domain
from builder.publish.model_configs import ServingOptions
from builder.store.store import FORMAT, Store
from builder.tables.domain import UpdateOptions
from builder.tables.domain import update_domain as build_version
from hplm.adapters.layout import Layout
from hplm.cli.main import main
from hplm.engine.backbone import Backbone
from hplm.errors import Broken, HplmError, InvalidInput, NoTenant
from hplm.levels.calibration import Calibration
from hplm.model.weights import save_weights
from hplm.registry.pointer import is_begun
from hplm.tenants.backup import restore
from hplm.tenants.exits import Exits, Plan
from hplm.tenants.import_state import import_state
from hplm.tenants.keys import allows
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import LIMITS
from testing.random_store import random_exit_knowledge, random_tenant, words
from testing.reference import Reference
from tests.builder.stores import light
from tests.cli.commands import flip, refused
from tests.support.answers import Comparison
from tests.support.faulty_folder import FaultyFolder
from tests.support.killed import content
from tests.support.message import mentions, refusing
from tests.tasks import same_labels

FIXTURE = Path(__file__).parent / "fixtures" / "before"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text("utf-8"))
VERSIONS = EXPECTED["versions"]  # of each tenant, by place
BACKBONE = "small"
CHANGES = 8  # of the old state


class Before:
    """`store`, `repository` of the folder and `old`, its state, are of the release before; `repository` and `live` are ours."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, Store(folder / "store")
        self.repository, self.live, self.old = folder / "new", folder / "live", folder / "state" / BACKBONE

    def export(self) -> None:
        export(self.store, self.repository, ServingOptions())

    def bring_over(self, source: str = "state", manager: Manager | None = None) -> bool:
        return import_state(manager or self.manager(), self.folder / source, self.folder / "repository", 60)

    def manager(self) -> Manager:
        return Manager.open(self.repository, self.live)

    def reference(self) -> Reference:
        return Reference.open(self.repository / BACKBONE / "1", self.live)


@pytest.fixture(scope="module", autouse=True)
def light_work():
    with light():
        yield


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(FIXTURE / "before.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    before = Before(folder)
    before.export()
    return before


@pytest.fixture
def before(first, tmp_path):
    """The old files, and an export of the store by this release."""
    shutil.copytree(first.folder, tmp_path / "before")
    return Before(tmp_path / "before")


@pytest.fixture
def brought(before):
    assert before.bring_over()
    return before


def assert_answers(reference, versions):
    """Checks that the tenants give the answers of these versions."""
    comparison = Comparison()
    for tenant_id, version in versions.items():
        task = reference.backbone.view.snapshot.find(tenant_id).task
        for answer in EXPECTED["answers"][tenant_id][str(version)]:
            asked = answer["text"], tenant_id, answer["pair"]
            reading = reference.answer(*asked)
            assert same_labels(task, reading.labels, answer["labels"])
            assert [list(span) for span in reading.spans] == answer["spans"]
            logits = np.nan_to_num(np.array(answer["logits"], dtype=float))  # None: a word without a token
            found = reference.forward(*asked).numpy()
            comparison.add(tenant_id, found[1:] if task == "span" else found, logits)  # that commit read the passage alone
    comparison.assert_equal("fp32")


def served_versions(reference):
    return {tenant.id: tenant.version for tenant in reference.backbone.view.snapshot.tenants}


def test_an_old_store_can_be_exported_and_answers_as_before(before):
    reference = Reference.open(before.repository / BACKBONE / "1")
    assert served_versions(reference) == VERSIONS["store"]
    assert_answers(reference, VERSIONS["store"])


def test_an_old_state_is_served_as_before(before, caplog):
    old = content(before.folder / "state")
    assert before.bring_over() and content(before.folder / "state") == old
    reference = before.reference()
    assert served_versions(reference) == VERSIONS["state"]
    assert_answers(reference, VERSIONS["state"])
    snapshot = reference.backbone.view.snapshot
    stored = json.loads((before.old / "snapshots/8").read_text("utf-8"))
    for entry in stored["tenants"]:
        tenant = snapshot.find(entry["id"])
        assert [(key.id, key.digest, key.expires) for key in tenant.keys] == [tuple(key.values()) for key in entry["keys"]]
        for name in ("uid", "version", "domain", "domain_version", "task", *LIMITS):
            assert getattr(tenant, name) == entry.get(name, 0), name
    assert allows(snapshot.find("acme").keys, f"Bearer {EXPECTED['secret']}", time.time())
    with pytest.raises(NoTenant):  # deleted from the state
        snapshot.find("echo")
    assert mentions(caplog.text, "echo")
    assert {tenant.id: tenant.version for tenant in snapshot.ledger.before} == {"city": 1, "acme": 1, "dune": 1}
    assert snapshot.ledger.last_versions == {"flux": 2} and snapshot.ledger.next_uid == 14
    assert len(list((before.live / BACKBONE / "records").iterdir())) == 4  # these three and flux: the export has the others
    pointer, audit = before.manager().registry.pointer(), before.manager().registry.audit()
    assert (pointer.generation, pointer.lease_s) == (CHANGES + 1, 60)
    assert [change["generation"] for change in audit] == list(range(1, CHANGES + 2))
    assert (audit[0]["who"], audit[0]["tenant"], audit[-1]["action"]) == ("hplm", "ivan", "import")


def test_what_was_served_before_it_can_be_served_again(brought):
    manager = brought.manager()
    assert manager.roll_back("city").after == 1 and manager.roll_back_domain("bio").moved == ["acme", "dune"]
    assert_answers(brought.reference(), {**VERSIONS["state"], "city": 1, "acme": 1, "dune": 1})


def test_its_store_and_it_can_be_updated(brought, tmp_path):
    rng, known, corpus = random.Random(0), words(brought.store.config.vocabulary), tmp_path / "corpus.txt"
    corpus.write_text("\n".join(" ".join(rng.choices(known, k=8)) for _ in range(12)), "utf-8")
    store = brought.store
    table = build_version(store, "bio", [corpus], UpdateOptions(), Budget(steps=0), torch.device("cpu"))
    assert table.meta.version == 3 and table.meta.keys > store.table("bio", 2).meta.keys
    random_tenant(store, replace(store.tenant("acme"), version=3, domain_version=3), 0.3, seed=0)
    moved = update_domain(brought.manager(), store, "bio")
    assert (moved.moved, moved.behind) == (["acme"], ["dune", "gaia", "many"])
    export(store, tmp_path / "fresh", ServingOptions())
    live, fresh = brought.reference(), Reference.open(tmp_path / "fresh" / BACKBONE / "1")
    assert_answers(live, {name: version for name, version in VERSIONS["state"].items() if name != "acme"})
    text = EXPECTED["answers"]["acme"]["1"][2]["text"]
    assert (live.forward(text, "acme") == fresh.forward(text, "acme")).all()


def test_tables_that_the_export_lacks_get_into_the_registry(before):
    for name in ("gaia", "many"):  # the only ones on version 1 of bio
        shutil.rmtree(before.folder / "store/tenants" / name)
    shutil.rmtree(before.repository)
    before.export()
    assert before.bring_over()
    manager = before.manager()
    (own,) = (branch for branch in manager.current().branches if branch.unique)
    assert (own.domain, own.version) == ("bio", 1) and manager.registry.collect() == 0
    assert_answers(before.reference(), VERSIONS["state"])
    assert main(["verify", "--store", str(before.folder / "store")]) == 0
    assert main(["verify", "--repository", str(before.repository), "--state", str(before.live)]) == 0


@pytest.mark.parametrize("kind", ["changes", "records", "snapshots", "CURRENT"])
def test_an_interrupted_import_leaves_no_registry_and_is_made_again(before, kind):
    folder = before.live / BACKBONE

    def fails(name):
        if name.startswith(kind) and (kind != "CURRENT" or (folder / "snapshots").exists()):
            raise OSError(name)

    manager = before.manager()
    manager.registry.store = FaultyFolder(folder, fails)
    with pytest.raises(OSError, match=kind):
        before.bring_over(manager=manager)
    with pytest.raises(InvalidInput, match="CURRENT is missing"):
        before.manager().registry.pointer()
    assert before.bring_over()
    assert before.manager().current().generation == CHANGES + 1 + (kind == "CURRENT")  # no generation is used twice
    assert_answers(before.reference(), VERSIONS["state"])


def without_changes(old):
    for path in ("snapshots", "adapters", "plot"):
        shutil.rmtree(old / path)
    (old / "registry.sqlite").unlink()
    (old / "CURRENT").write_text("0\n")


@pytest.mark.parametrize(
    ("change", "served"),
    [
        (lambda old: (old / "CURRENT").write_text("7\n"), "state"),  # a decided change that was not published counts
        (without_changes, "export"),
    ],
)
def test_an_old_state_whose_last_change_was_not_published_or_that_has_none_is_served(before, change, served):
    change(before.old)
    assert before.bring_over()
    assert served_versions(before.reference()) == VERSIONS[served]
    assert_answers(before.reference(), VERSIONS[served])


def test_an_old_backup_is_brought_over_as_well(before):
    backup = before.old.rename(before.folder / "saved")
    (backup / "backup.json").write_text(json.dumps({"format": 1, "export": "", "generation": CHANGES}))
    with pytest.raises(InvalidInput, match=r"saved has format 1\b.*`hplm begin --from`"):
        restore(backup, before.manager().registry)
    assert before.bring_over("saved")
    assert_answers(before.reference(), VERSIONS["state"])


def edit(path, change):
    """Changes the tenants of an old snapshot, by id. Its newest format is 9."""
    stored = json.loads(path.read_text("utf-8"))
    for entry in stored["tenants"]:
        entry.update(change.get(entry["id"], {}))
    path.write_text(json.dumps({**stored, "format": 9}))


def add_bank(folder, layout, uid, version, weights):
    """Writes an old bank with one record."""
    content = weights.view(torch.uint8).numpy().tobytes()
    header = np.array([(uid, version, zlib.crc32(content))], dtype="<u8,<u4,<u4").tobytes().ljust(64, b"\0")
    page = json.dumps({"format": 4, "layout": asdict(layout)}).encode().ljust(4096, b"\0")
    (folder / "exit.bank").write_bytes(page + header + content)
    return {"bank": "state/exit.bank", "index": 0, "uid": uid, "version": version}


def test_calibrations_and_exits_come_along_and_what_is_no_longer_served_is_dropped_with_a_line(before, caplog):
    config, warm = before.store.config, Calibration(temperature=2.0)
    layout = Layout("exit", 16, config.hidden, config.upper_layers, intermediate=32, dtype="bf16")
    weights = torch.randn(layout.layers, layout.layer_size).to(torch.bfloat16)
    record = add_bank(before.old / "adapters", layout, 1, 2, weights)
    exits = Exits(None, (warm,) * layout.layers, (Plan(0, 0.5, 0.5, 1.0, 0.5),))
    change = {
        "acme": {"calibration": asdict(warm), "exits": {**asdict(exits), "record": record}, "homes": 3},
        "beta": {"calibration": {**asdict(warm), "kind": "gone"}, "levels": [{"stack": "small"}], "ladder": {"rungs": []}},
    }
    edit(before.old / "snapshots/8", change)
    with caplog.at_level(logging.WARNING):
        assert before.bring_over()
    reference = before.reference()
    acme, beta = (reference.backbone.view.snapshot.find(name) for name in change)
    assert (acme.calibration, acme.homes, replace(acme.exits, record=None)) == (warm, 3, exits)
    out = Layout.of(acme.exits.record.layout).empty()
    reference.backbone.records.read(acme.exits.record, out)
    assert torch.equal(out, weights) and beta.calibration is None
    assert_answers(reference, {"beta": 1})
    of_beta = [line for line in caplog.messages if "beta" in line]
    assert len(of_beta) == 2 and mentions(of_beta, "levels, ladder") and mentions(of_beta, "gone")


def test_a_bank_that_was_written_again_at_its_path_is_read_again(before):
    config = before.store.config
    for size in (32, 16):
        before.live = before.folder / f"live-{size}"
        layout = Layout("exit", 16, config.hidden, config.upper_layers, intermediate=size, dtype="bf16")
        weights = torch.randn(layout.layers, layout.layer_size).to(torch.bfloat16)
        exits = Exits(None, (Calibration(temperature=2.0),) * layout.layers, (Plan(0, 0.5, 0.5, 1.0, 0.5),))
        record = add_bank(before.old / "adapters", layout, 1, 2, weights)
        edit(before.old / "snapshots/8", {"acme": {"exits": {**asdict(exits), "record": record}}})
        assert before.bring_over()
        assert Layout.of(before.manager().current().find("acme").exits.record.layout) == layout


def test_a_stored_or_exported_calibration_or_ladder_that_is_no_longer_served_is_left_out_with_a_line(before, caplog):
    folder, again = before.folder / "store/tenants/beta/1", before.folder / "again" / BACKBONE / "1"
    (folder / "calibration.json").write_text(json.dumps({"calibration": {"kind": "gone"}, "asked": {}, "report": {}}))
    (folder / "ladder.json").write_text("{}")
    export(before.store, before.folder / "again", ServingOptions())
    exported = before.repository / BACKBONE / "1"
    stored = json.loads((exported / "tenants.json").read_text("utf-8"))
    stored["tenants"][1]["calibration"] = {"kind": "went"}
    (exported / "tenants.json").unlink()
    (exported / "tenants.json").write_text(json.dumps(stored))
    for own in (again, exported):
        reference = Reference.open(own)
        assert reference.backbone.view.snapshot.find("beta").calibration is None
        assert_answers(reference, {"beta": 1})
    for named in ([folder / "calibration.json"], [folder / "ladder.json"], ["beta", "went"]):
        assert any(mentions(line, *named) for line in caplog.messages), named


def test_exits_and_calibrations_of_its_store_are_read_and_the_next_version_is_a_record(before):
    store, tenant, warm = before.store, before.store.tenant("acme"), Calibration(temperature=2.0)
    folder, exits = store.tenant_folder("acme", 2), random_exit_knowledge(store.config, tenant)
    wanted = replace(store.knowledge(tenant), exits=exits, calibration=warm).packed().content
    heads = {f"{i}.{key}": one for i, layer in enumerate(exits.heads) for key, one in layer.items()}
    save_weights(heads, folder / "exits.safetensors")
    for file, own in {"exits": asdict(exits.exits), "calibration": asdict(warm)}.items():
        (folder / f"{file}.json").write_text(json.dumps({file: own}))
    assert store.format < FORMAT and store.knowledge(tenant).packed().content == wanted
    found, again = store.save_next(tenant, store.knowledge(tenant), store.report(tenant)), Store(store.folder)
    assert again.format == FORMAT and found == again.tenant("acme") == replace(tenant, version=3)
    assert again.knowledge(found).packed().content == wanted
    for file, wrong in (("calibration.json", "{"), ("calibration.json", "[]"), ("exits.json", "{}"), ("tenant.json", "{}")):
        (folder / file).write_text(wrong)
        with refusing(Broken, folder / file):
            again.knowledge(again.tenant_version("acme", 2))
        (folder / file).unlink()


def sql(path, command):
    with sqlite3.connect(path) as database:
        database.execute(command)


OLD, EXPORT, BANK = f"state/{BACKBONE}", f"repository/{BACKBONE}/1", "head-64.g2.bank"
UNFIT = {  # what is wrong, and what the error names
    "no state": (lambda at: (at / OLD / "CURRENT").unlink(), [OLD, "CURRENT"]),
    "not of the release before": (lambda at: (at / OLD / "CURRENT").write_text("{}"), [OLD, "hplm backup"]),
    "a copy": (lambda at: (at / OLD / "FOLLOWED").write_text("{}"), [OLD, "copy"]),
    "no export": (lambda at: shutil.rmtree(at / EXPORT), [EXPORT, "--from-repository"]),
    "an export of this release": (
        lambda at: shutil.copy(at / f"new/{BACKBONE}/1/tenants.json", at / EXPORT),
        [EXPORT, 10, "--from-repository"],
    ),
    "another store": (lambda at: flip(at / EXPORT / "upper.safetensors"), [EXPORT, "store"]),
    "another table": (lambda at: flip(at / EXPORT / "plot/law/1/checksums"), [EXPORT, "law", 1]),
    "a lost change": (lambda at: sql(at / OLD / "registry.sqlite", "DELETE FROM audit WHERE generation > 6"), [OLD, 8, 6]),
    "a broken registry": (lambda at: flip(at / OLD / "registry.sqlite", 0), [OLD, "registry.sqlite"]),
    "a lost bank": (lambda at: (at / OLD / "adapters" / BANK).unlink(), [BANK, "--from-repository"]),
    "a corrupt record": (lambda at: flip(at / OLD / "adapters" / BANK, 4096 + 64), [BANK, 0, "checksum"]),
    "a record of another": (lambda at: flip(at / OLD / "adapters" / BANK, 4096), [BANK, 0, "hplm restore"]),
    "no tenant": (lambda at: edit(at / OLD / "snapshots/8", {"beta": {"rate": "much"}}), [OLD, "beta"]),
}


@pytest.mark.parametrize("wrong", UNFIT)
def test_what_does_not_fit_is_refused_and_nothing_begins(before, wrong):
    harm, named = UNFIT[wrong]
    harm(before.folder)
    with pytest.raises(HplmError) as error:
        before.bring_over()
    assert mentions(error.value, *named)
    assert not is_begun(before.manager().registry.store) and not (before.live / BACKBONE / "snapshots").exists()


def test_the_command_brings_a_state_over_once_and_names_what_it_needs(before, capsys):
    places = ["--repository", before.repository, "--state", before.live]
    source = ["--from", before.folder / "state"]
    assert mentions(refused(capsys, "begin", *places, *source), "--from-repository")
    source += ["--from-repository", before.folder / "repository"]
    assert main(list(map(str, ["begin", *places, *source]))) == 0
    assert mentions(capsys.readouterr().out, before.live, before.folder / "state", BACKBONE)
    assert mentions(refused(capsys, "begin", *places, *source), before.live, BACKBONE)
    assert_answers(before.reference(), VERSIONS["state"])


def test_old_files_are_refused_with_the_command_that_goes_on_from_them(before, capsys):
    with pytest.raises(InvalidInput, match=r"repository/small/1/tenants\.json has format 2\b.*`hplm export`"):
        Backbone(before.folder / EXPORT)
    with pytest.raises(InvalidInput, match=r"state/small/CURRENT .*new state.*`hplm begin --from`"):
        Backbone(before.repository / BACKBONE / "1", before.folder / "state")
    said = refused(capsys, "export", "--store", before.folder / "store", "--repository", before.folder / "repository")
    assert mentions(said, before.folder / EXPORT, "--repository", "hplm begin --from", "--replace")
    said = refused(capsys, "begin", "--repository", before.repository, "--state", before.folder / "state")
    assert mentions(said, before.old / "CURRENT", "hplm begin --from")
