"""`hplm domain` and `hplm verify` as a user meets them."""

import json
import shutil

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from hplm.adapters.bank import HEADER_BYTES, PAGE, Bank, record_bytes
from hplm.cli.main import main
from testing.random_store import random_stack, random_store, random_tenant, random_tenants
from testing.toy import CONFIG
from tests.builder.tables.branches import some_lines
from tests.builder.tables.test_domain import corpus, rooted, tenant
from tests.support.message import mentions

pytestmark = pytest.mark.slow


def run(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def refused(capsys, *arguments):
    assert main(list(map(str, arguments))) == 1
    return capsys.readouterr().err


def broken_of(said):
    """Returns the errors of `hplm verify`: a line each, after a line with their number."""
    first, *broken = said[said.index("hplm verify: ") :].splitlines()
    assert mentions(first, len(broken)), said
    return broken


@pytest.fixture
def grown(tmp_path, capsys):
    """A store with a root, a domain of two versions with a tenant on the first one, and a child of that domain."""
    store = rooted(tmp_path)
    build = ["build", "domain", "--store", store.folder, "--minutes", 0, "--min-tokens", 1]
    run(capsys, *build, "--name", "bio", "--corpus", corpus(tmp_path, 1), "--keep", 0.5, "--dtype", "int8")
    tenant(store, "acme", "bio")
    run(capsys, "domain", "update", "--store", store.folder, "--name", "bio", "--corpus", corpus(tmp_path, 2))
    run(capsys, *build, "--name", "cells", "--parent", "bio", "--corpus", corpus(tmp_path, 3))
    return store


def test_list_prints_the_domains_as_a_tree(grown, capsys):
    rows = run(capsys, "domain", "list", "--store", grown.folder)["domains"]
    assert [(row["domain"], row["version"], row["parent"], row["parent_version"], row["tenants"]) for row in rows] == [
        ("root", 1, None, None, 0),
        ("bio", 1, "root", 1, 1),
        ("bio", 2, "root", 1, 0),
        ("cells", 1, "bio", 2, 0),
    ]
    assert [row["dtype"] for row in rows] == ["fp16", "int8", "int8", "fp16"]
    assert rows[2]["ngrams"] > rows[1]["ngrams"] and rows[2]["tokens"] > rows[1]["tokens"] and rows[2]["mb"] > rows[1]["mb"]
    assert main(["domain", "list", "--store", str(grown.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["root", "bio", "bio", "cells"]
    assert [len(line) - len(line.lstrip()) for line in lines] == [0, 2, 2, 4]


def test_update_names_the_tenants_that_are_behind(grown, capsys, tmp_path):
    updated = run(capsys, "domain", "update", "--store", grown.folder, "--name", "bio", "--corpus", corpus(tmp_path, 4))
    assert updated["version"] == 3 and updated["behind"] == ["acme"] and updated["dtype"] == "int8"


def test_inspect_prints_the_facts_of_a_table(grown, capsys, tmp_path):
    text, picture = tmp_path / "text.txt", tmp_path / "coverage.png"
    text.write_text("\n".join(some_lines(5, 2) + some_lines(5, 8)), "utf-8")
    inspect = ["domain", "inspect", "--store", grown.folder, "--name", "bio", "--top", 3]
    told = run(capsys, *inspect, "--text", text, "--keep", "0.25,0.1,0", "--picture", picture)
    assert told["version"] == 2 and told["versions"] == [1, 2] and told["users"] == ["domain cells version 1"]
    assert told["behind"] == [{"tenant": "acme", "version": 1}]
    assert sum(told["coverage"]["levels"].values()) == pytest.approx(1)
    assert list(told["coverage"]["levels"]) == ["domain", "root", "2-gram", "1-gram"]
    for kept in told["coverage"]["kept"]:
        assert kept["here"] + kept["above"] + sum(kept["shorter"].values()) == pytest.approx(1)
        assert kept["int8_bytes"] < kept["fp16_bytes"] or not kept["ngrams"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*map(str, inspect), "--version", "1", "--text", str(text)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(mentions(line, "acme") for line in lines) == 2, "as one that stands on it, and as one that is behind"
    assert any(mentions(line, "acme", 1, 2) for line in lines) and any(mentions(line, "3-gram") for line in lines)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["delete", "--name", "bio"], ["'bio'", "cells", 1, "acme"]),
        (["delete", "--name", "bio", "--version", "1"], ["'bio'", 1, "acme"]),
        (["inspect", "--name", "bio", "--version", "9"], ["'bio'", 9, 1, 2]),
        (["inspect", "--name", "law"], ["'law'"]),
        (["inspect", "--name", "bio", "--picture", "x.png"], ["--picture", "--text"]),
        (["inspect", "--name", "bio", "--text", "none.txt"], ["none.txt"]),
        (["update", "--name", "bio", "--corpus", "none.txt"], ["none.txt"]),
    ],
)
def test_impossible_actions_are_refused_by_name(grown, capsys, arguments, named):
    assert mentions(refused(capsys, "domain", *arguments, "--store", grown.folder), *named)


def flip(path, offset):
    """Flips a bit in a copy of a file, because exported files are hard links to those of the store."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.unlink()
    path.write_bytes(content)


@pytest.fixture
def repository(toy, tmp_path):
    shutil.copytree(toy.repository, tmp_path / "repository")
    return tmp_path / "repository"


def test_verify_accepts_undamaged_files(toy, grown, capsys):
    assert run(capsys, "verify", "--repository", toy.repository)["tables"] == 3
    assert run(capsys, "verify", "--repository", toy.repository)["banks"] > 2
    assert run(capsys, "verify", "--store", grown.folder)["tables"] == 4
    assert main(["verify", "--store", str(toy.store.folder)]) == 0
    assert mentions(capsys.readouterr().out, "ok", 3, 0)


def test_verify_names_everything_that_is_broken(repository, capsys):
    folder = repository / "toy" / "1"
    row = json.loads((folder / "plot/bio/1/meta.json").read_text())["hidden"] * 3 * 2
    for number in (5, 9):
        flip(folder / "plot/bio/1/values", number * row + 7)
    flip(folder / "plot/law/1/keys", 3)
    bank = next((folder / "adapters").glob("bottleneck-8x2.bank"))
    flip(bank, PAGE + record_bytes(Bank(bank).layout) + HEADER_BYTES + 1)
    head = next((folder / "adapters").glob("head-16.bank"))
    flip(head, PAGE)  # the owner of the record
    (folder / "upper.safetensors").write_bytes((folder / "upper.safetensors").read_bytes()[:-1])
    broken = broken_of(refused(capsys, "verify", "--repository", repository))
    assert len(broken) == 5
    for named in (
        [folder / "plot/bio/1", 5, 9, "values"],
        [folder / "plot/law/1/keys"],
        [bank, 1],
        ["acme", 0, "head-16.bank"],
        [folder / "upper.safetensors"],
    ):
        assert any(mentions(line, *named) for line in broken), named


def test_verify_checks_the_stacks_of_a_store_and_of_a_model_folder(capsys, tmp_path):
    store = random_store(tmp_path / "store", CONFIG, random_tenants(1, 2, 2), corpus_tokens=500)
    random_stack(store, "small", 1, seed=1)
    random_stack(store, "deep", 1, seed=2)
    export(store, tmp_path / "repository", ServingOptions())
    places = ("--store", store.folder), ("--repository", tmp_path / "repository")
    for place in places:
        run(capsys, "verify", *place)
    served = tmp_path / "repository/toy/1/stacks"
    flip(store.stack_file("small"), -5)
    flip(served / "small.safetensors", -5)
    for path in (store.stack_file("deep"), served / "deep.safetensors"):
        path.unlink()
        path.write_bytes((store.folder / "upper.safetensors").read_bytes())
    store.stack_file("deep", ".json").unlink()
    for place, folder, lost in zip(places, (store.folder / "stacks", served), (1, 0), strict=True):
        broken = broken_of(refused(capsys, "verify", *place))
        assert len(broken) == 2 + lost
        assert any(mentions(line, folder / "small.safetensors") for line in broken)
        assert any(mentions(line, folder / "deep.safetensors", CONFIG.upper_layers) for line in broken)
    assert mentions(refused(capsys, "verify", "--store", store.folder), store.stack_file("deep", ".json"))


def test_verify_names_all_damaged_files_of_a_store(grown, capsys):
    table = grown.table_folder("bio", 1)
    (table / "values").write_bytes((table / "values").read_bytes()[:-1])
    flip(grown.table_folder("root", 1) / "values", 5000)
    counts = grown.counts_folder("bio", 2) / "keys-0"
    counts.write_bytes(counts.read_bytes()[:-8])
    (grown.tenant_folder("acme", 1) / "head.safetensors").write_bytes(b"")
    flip(grown.folder / "upper.safetensors", -5)
    broken = broken_of(refused(capsys, "verify", "--store", grown.folder))
    assert len(broken) == 5
    head, root = grown.tenant_folder("acme", 1) / "head.safetensors", grown.table_folder("root", 1)
    for named in (table / "values", root, counts.parent, head, grown.folder / "upper.safetensors"):
        assert any(mentions(line, named) for line in broken), named


def test_verify_names_files_that_a_store_has_lost(grown, capsys):
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
    broken = broken_of(refused(capsys, "verify", "--store", grown.folder))
    assert len(broken) == 6
    for named in (
        ["acme", lost[0]],
        ["rich", lost[1]],
        ["nameless", lost[2]],
        [lost[3].parent, "meta.json"],
        ["acme", grown.table_folder("bio", 1)],
        [grown.table_folder("cells", 1), grown.table_folder("bio", 2)],
    ):
        assert any(mentions(line, *named) for line in broken), named


def test_a_tenants_old_version_is_valid_without_its_table(grown, capsys):
    random_tenant(grown, TenantFile("acme", 2, "bio", 2, "classify", ["a", "b"], 0), 0.3, seed=1)
    grown.remove_branch("bio", 1)
    assert run(capsys, "verify", "--store", grown.folder)["tables"] == 3


def test_verify_needs_a_store_or_a_repository(capsys, tmp_path):
    assert mentions(refused(capsys, "verify", "--repository", tmp_path), tmp_path)
    assert mentions(refused(capsys, "verify", "--store", tmp_path, "--state", tmp_path), "--state", "--repository")
