"""`hplm verify`: it names everything that is broken in a store, an export or a live state, and nothing else."""

import json
import shutil

import pytest

from builder.publish.live import update_domain
from builder.store.store import TenantFile
from hplm.levels.calibration import DIRICHLET, Calibration
from hplm.tenants.snapshot import Snapshot
from testing.random_store import change_version, random_tenant
from tests.cli.commands import expect_broken, flip, printed, refused, run
from tests.support.message import mentions

pytestmark = pytest.mark.slow


def test_undamaged_files_are_accepted(toy, grown, capsys):
    found = run(capsys, "verify", "--repository", toy.repository)
    assert found["tables"] == 3 and found["records"] > 2
    assert mentions(printed(capsys, "verify", "--store", toy.store.folder), "ok", 3, 0)
    assert run(capsys, "verify", "--store", grown.folder)["tables"] == 4
    random_tenant(grown, TenantFile("acme", 2, "bio", 2, "classify", ["a", "b"], 0), 0.3, seed=1)
    grown.remove_branch("bio", 1)  # of an old version of a tenant
    assert run(capsys, "verify", "--store", grown.folder)["tables"] == 3


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
    random_tenant(grown, TenantFile("many", 1, "root", 1, "classify", ["a", "b", "c"], 4), 0.3, seed=1)
    of_two = Calibration(DIRICHLET, weights=((1.0, 0.0), (0.0, 1.0)), bias=(0.0, 0.0))
    change_version(grown, grown.tenant("many"), calibration=of_two)
    broken = [table / "values", root, counts.parent, head, grown.folder / "upper.safetensors"]
    said = refused(capsys, "verify", "--store", grown.folder)
    expect_broken(said, *([path] for path in broken), ["many/1", 3])


def test_files_that_a_store_has_lost_are_named(grown, capsys):
    random_tenant(grown, TenantFile("rich", 1, "root", 1, "classify", ["a", "b"], 4), 0.3, seed=1)
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
        expect_broken(refused(capsys, "verify", *places), [snapshot])
    for content in ("seven", "7", "{}"):
        (state / "toy/CURRENT").write_text(content)
        expect_broken(refused(capsys, "verify", *places), [state / "toy/CURRENT"])
