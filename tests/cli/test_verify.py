"""`hplm verify`: it names everything that is broken in a store, an export or a live state, and nothing else."""

import json
import shutil

import pytest

from builder.publish.live import update_domain
from builder.store.store import TenantFile
from hplm.adapters.bank import HEADER_BYTES, PAGE, Bank, record_bytes
from testing.random_store import random_tenant
from tests.cli.commands import expect_broken, printed, refused, run
from tests.support.message import mentions

pytestmark = pytest.mark.slow


def flip(path, offset):
    """Flips a bit in a copy of a file, because exported files are hard links to those of the store."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.unlink()
    path.write_bytes(content)


def test_undamaged_files_are_accepted(toy, grown, capsys):
    found = run(capsys, "verify", "--repository", toy.repository)
    assert found["tables"] == 3 and found["banks"] > 2
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
    bank = next((folder / "adapters").glob("bottleneck-8x2.bank"))
    flip(bank, PAGE + record_bytes(Bank(bank).layout) + HEADER_BYTES + 1)
    flip(next((folder / "adapters").glob("head-16.bank")), PAGE)  # the owner of the record
    (folder / "upper.safetensors").write_bytes((folder / "upper.safetensors").read_bytes()[:-1])
    expect_broken(
        refused(capsys, "verify", "--repository", repository),
        [folder / "plot/bio/1", 5, 9, "values"],
        [folder / "plot/law/1/keys"],
        [bank, 1],
        ["acme", 0, "head-16.bank"],
        [folder / "upper.safetensors"],
    )


def test_all_damaged_files_of_a_store_are_named(grown, capsys):
    table, root = grown.table_folder("bio", 1), grown.table_folder("root", 1)
    (table / "values").write_bytes((table / "values").read_bytes()[:-1])
    flip(root / "values", 5000)
    counts = grown.counts_folder("bio", 2) / "keys-0"
    counts.write_bytes(counts.read_bytes()[:-8])
    head = grown.tenant_folder("acme", 1) / "head.safetensors"
    head.write_bytes(b"")
    flip(grown.folder / "upper.safetensors", -5)
    broken = [table / "values", root, counts.parent, head, grown.folder / "upper.safetensors"]
    expect_broken(refused(capsys, "verify", "--store", grown.folder), *([path] for path in broken))


def test_files_that_a_store_has_lost_are_named(grown, capsys):
    for name in ("rich", "nameless"):
        random_tenant(grown, TenantFile(name, 1, "root", 1, "classify", ["a", "b"], 4), 0.3, seed=1)
    lost = [
        grown.tenant_folder("acme", 1) / "head.safetensors",
        grown.tenant_folder("rich", 1) / "adapter.safetensors",
        grown.tenant_folder("nameless", 1) / "tenant.json",
        grown.table_folder("root", 1) / "meta.json",
    ]
    for path in lost:
        path.unlink()
    for version in (1, 2):
        shutil.rmtree(grown.table_folder("bio", version))
    expect_broken(
        refused(capsys, "verify", "--store", grown.folder),
        ["acme", lost[0]],
        ["rich", lost[1]],
        ["nameless", lost[2]],
        [lost[3].parent, "meta.json"],
        ["acme", grown.table_folder("bio", 1)],
        [grown.table_folder("cells", 1), grown.table_folder("bio", 2)],
    )


@pytest.fixture
def changed(live):
    """A state whose first change was one of a domain, and its options."""
    update_domain(live.manager, live.store, "bio")
    return live.folder / "state/toy", [*live][1]


def test_a_state_is_verified_with_its_registry(changed, capsys):
    state, places = changed
    assert run(capsys, "verify", *places)["tables"] == 3
    registry = bytearray((state / "registry.sqlite").read_bytes())
    registry[100:4000] = b"\x07" * 3900
    (state / "registry.sqlite").write_bytes(registry)
    (state / "snapshots/1").write_text("{")
    expect_broken(refused(capsys, "verify", *places), [state / "registry.sqlite"], [state / "snapshots/1"])


def test_the_registry_is_compared_with_the_published_generation(changed, capsys):
    state, places = changed
    current = state / "CURRENT"
    for content, others, named in (
        (None, [], [1, 0, "hplm tenant", "hplm domain"]),
        ("0", [], [1, 0, "hplm tenant", "hplm domain"]),
        ("7", [["snapshots/7"]], [1, 7]),
        ("seven", [], []),
    ):
        current.unlink()
        if content is not None:
            current.write_text(content)
        expect_broken(refused(capsys, "verify", *places), [current, *named], *others)
        current.write_text("1\n")
    current.unlink()
    run(capsys, "domain", "rollback", "--name", "bio", *places)
    assert current.read_text() == "2\n" and run(capsys, "verify", *places)["banks"]


def test_a_state_whose_first_change_failed_is_valid_and_a_folder_that_is_none_is_refused(live, capsys):
    _, places = live
    (live.folder / "state/toy/registry.sqlite").touch()
    assert run(capsys, "verify", *places)["tables"] == 2
    (live.folder / "empty").mkdir()
    for name in ("state/toy", "empty"):
        said = refused(capsys, "verify", *places[:3], live.folder / name)
        assert mentions(said, live.folder / name / "toy", "registry.sqlite", "CURRENT")


def test_a_broken_bank_of_a_state_names_hplm_restore(live, capsys):
    """The folder's name has characters with a meaning in a URI."""
    store, places = live
    run(capsys, "tenant", "add", "acme", *store, *places)
    shutil.move(live.folder / "state", live.folder / "live#1?")
    places = [*places[:3], live.folder / "live#1?"]
    assert run(capsys, "verify", *places)["banks"] > 2
    bank = next((live.folder / "live#1?/toy/adapters").glob("*.bank"))
    with open(bank, "r+b") as file:
        file.write(b"?")
    said = refused(capsys, "verify", *places)
    assert mentions(said, bank, "hplm restore") and "hplm export" not in said
