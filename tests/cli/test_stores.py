"""`hplm domain` and `hplm import` in a store, as a user meets them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from builder.importing.folders import write_page
from builder.store.store import Store
from hplm.cli.main import main
from hplm.tenants.directory import Directory
from testing.random_store import random_tenant
from tests.builder.checkpoints import SIZES, save_base, save_tokenizer
from tests.builder.importing.stores import FIXTURES, LABELS, make_imported_store, texts, tuned
from tests.builder.stores import add_tenant, corpus, some_lines
from tests.cli.commands import printed, refused, run
from tests.cli.conftest import ACME
from tests.support.learning import by_one_step
from tests.support.message import mentions

pytestmark = pytest.mark.slow


def test_domains_are_listed_as_a_tree_and_an_update_names_the_tenants_that_are_behind(grown, capsys, tmp_path):
    rows = run(capsys, "domain", "list", "--store", grown.folder)["domains"]
    assert [(row["domain"], row["version"], row["parent"], row["parent_version"], row["tenants"]) for row in rows] == [
        ("root", 1, None, None, 0),
        ("bio", 1, "root", 1, 1),
        ("bio", 2, "root", 1, 0),
        ("cells", 1, "bio", 2, 0),
    ]
    assert [row["dtype"] for row in rows] == ["fp16", "int8", "int8", "fp16"]
    assert all(rows[2][more] > rows[1][more] for more in ("ngrams", "tokens", "mb"))
    _, *lines = printed(capsys, "domain", "list", "--store", grown.folder).splitlines()
    assert [len(line) - len(line.lstrip()) for line in lines] == [0, 2, 2, 4]
    updated = run(capsys, "domain", "update", "--store", grown.folder, "--name", "bio", "--corpus", corpus(tmp_path, 4))
    assert updated["version"] == 3 and updated["behind"] == ["acme"] and updated["dtype"] == "int8"


def test_a_tenant_that_cannot_be_read_is_named_and_stops_only_what_would_lose_it(grown, capsys, tmp_path):
    """Its table's version is without readable users, and must stay."""
    add_tenant(grown, "beta", "cells")
    (path,) = grown.tenant_folder("acme", 1).glob("*.safetensors")
    path.write_text("{")
    (grown.tenant_folder("beta", 1) / "report.json").write_text("{")
    of = ["--store", str(grown.folder)]
    for command in (
        ["domain", "list"], ["domain", "inspect", "--name", "bio"],
        ["domain", "update", "--name", "bio", "--corpus", str(corpus(tmp_path, 4))],
    ):  # fmt: skip
        assert main([*command, *of]) == 0
        assert mentions(capsys.readouterr().err, "tenant acme", path.parent)
    assert [version for name, version in grown.domains() if name == "bio"] == [1, 2, 3]
    write_page(grown, [])
    assert mentions(capsys.readouterr().err, "tenant acme", "tenant beta", "report.json")
    for command in (["domain", "delete", "--name", "cells"], ["export", "--repository", tmp_path / "served"]):
        assert mentions(refused(capsys, *command, *of), path.parent, "delete the tenant")
    assert main(["tenant", "delete", "acme", *of]) == 0 and grown.sweep() == [("bio", 1)]


def test_inspect_prints_the_facts_of_a_table(grown, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(some_lines(5, 2) + some_lines(5, 8)), "utf-8")
    inspect = ["domain", "inspect", "--store", grown.folder, "--name", "bio"]
    told = run(capsys, *inspect, "--text", text, "--keep", "0.25,0.1,0")
    assert told["version"] == 2 and told["versions"] == [1, 2] and told["users"] == ["domain cells version 1"]
    assert told["behind"] == [{"tenant": "acme", "version": 1}]
    assert sum(told["coverage"]["levels"].values()) == pytest.approx(1)
    assert list(told["coverage"]["levels"]) == ["domain", "root", "2-gram", "1-gram"]
    for kept in told["coverage"]["kept"]:
        assert kept["here"] + kept["above"] + sum(kept["shorter"].values()) == pytest.approx(1)
        assert kept["int8_bytes"] < kept["fp16_bytes"] or not kept["ngrams"]
    lines = printed(capsys, *inspect, "--version", "1", "--text", text).splitlines()
    assert sum(mentions(line, "acme") for line in lines) == 2, "as one that stands on it, and as one that is behind"


def test_all_tenants_of_a_store_are_published_in_one_change_and_one_that_is_refused_holds_up_no_other(live, capsys):
    store, places = live
    command = ["tenant", "publish", *store, *places]
    for served in (None, 1):  # the second time nothing is changed
        done = run(capsys, *command, status=3)
        versions = {name: [one["before"], one["after"]] for name, one in done["tenants"].items()}
        assert versions == {"acme": [served, 1], "tenant-3": [1, 1]} and done["generation"] == 1
        assert set(done["refused"]) == {"tenant-0", "tenant-1", "tenant-2"}  # their table is not served yet
        assert mentions(done["refused"]["tenant-0"], "bio", 2, "hplm domain")
    assert mentions(refused(capsys, *command[:2], "tenant-0", *command[2:]), "bio", 2)
    assert mentions(refused(capsys, *command[:2], "acme", "nobody", *command[2:]), "'nobody'")
    printed(capsys, "domain", "update", "--name", "bio", *store, *places)
    random_tenant(live.store, replace(ACME, version=2), 0.3, seed=2)
    done = run(capsys, *command[:2], "acme", "tenant-0", *command[2:])
    assert done["tenants"] == {"acme": {"before": 1, "after": 2}, "tenant-0": {"before": 2, "after": 2}}
    lines = printed(capsys, *command).splitlines()
    assert len(lines) == 6 and mentions(lines[-1], 5, "generation 3")


@pytest.mark.usefixtures("in_this_process")
@by_one_step()
def test_a_folder_of_checkpoints_becomes_tenants(tmp_path, capsys):
    """Several at a time, which learn in processes of their own: `tests/builder/test_killed.py`."""
    store, folder = make_imported_store(tmp_path), tmp_path / "models"
    for name in ("one", "Two!"):
        tuned(folder / name)
    command = ["import", "--store", store, "--device", "cpu", "--from", folder]
    matching = ["--texts", texts(tmp_path, 60), "--rank", 2, "--least", 0]
    assert mentions(refused(capsys, *command[:-1], folder / "one", "--plan"), "--texts")
    plan = run(capsys, *command, *matching, "--plan")
    assert plan["fit"].keys() == {"one", "two"} and plan["seconds_each"] is None and not Store(store).tenant_ids()
    answer = run(capsys, *command, *matching)
    assert answer["imported"].keys() == {"one", "two"} == set(Store(store).tenant_ids()) and not answer["refused"]
    assert Path(answer["page"]).exists()
    assert answer["totals"]["checkpoints"] == 2 and 0 <= answer["totals"]["agreement"] <= 1
    assert answer["totals"]["bytes"] == {"tenant": plan["bytes"]["after"], "checkpoint": plan["bytes"]["before"]}
    assert mentions(printed(capsys, *command, *matching, "--plan"), "checkpoints that fit: 2", "each, as earlier")
    other = [*command[:-1], folder / "one", *matching, "--plan", "--task", "multilabel", "--id"]
    assert run(capsys, *other, "other")["fit"]["other"]["task"] == "multilabel"
    assert run(capsys, *other[:-3], "--id", "two")["fit"].keys() == {"two"}, "the user may name any tenant"
    part = run(capsys, *command, *matching, "--part", "2/2")
    assert part["imported"].keys() == {"one"} and Path(part["page"]).name == "imports-2-of-2.html"
    assert run(capsys, *command[:-1], folder / "one", *matching, "--part", "2/2")["imported"] == {}
    (nameless := folder / "日本").mkdir()
    assert main([str(word) for word in (*command, *matching, "--plan")]) == 1
    assert mentions(capsys.readouterr().err, nameless, "--id", f"two (from {folder}/Two!)")
    nameless.rmdir()
    served = tmp_path / "served"
    run(capsys, *command[:-1], folder / "one", *matching, "--id", "acme", "--repository", served)
    assert {tenant.id for tenant in next(iter(Directory(served, None).snapshots())).tenants} == {"one", "two", "acme"}
    (folder / "Two!" / "config.json").write_text("{}")
    assert main([str(word) for word in (*command, *matching)]) == 3
    said = capsys.readouterr()
    assert "/Two!) refused" in said.err and "tenants imported: 1; folders refused: 1" in said.out
    assert "importing: 100%" in said.err and "looking up" not in said.err, "one bar for all"
    assert "next: hplm export" in said.out
    assert mentions(refused(capsys, *command[:-1], FIXTURES / "peft-pooler", "--rank", 3), "--rank", "checkpoints")
    assert mentions(refused(capsys, *command, *matching, "--id", "acme"), "--id", "2 are given")
    assert mentions(refused(capsys, *command, *matching, "--root", "other"), "--root other", "made from")
    assert mentions(refused(capsys, *command, *matching, "--task", "tag"), "--task", "one folder")
    (folder / "one" / "config.json").write_text("{}")
    assert main([str(word) for word in (*command, *matching)]) == 3
    assert "next" not in capsys.readouterr().out


@by_one_step()
def test_without_a_store_an_import_builds_the_root_first(tmp_path, capsys, monkeypatch):
    """The model is a folder beside the current one."""
    monkeypatch.chdir(tmp_path)
    save_base(tmp_path / "base")
    save_tokenizer(tmp_path / "base", SIZES["vocab_size"])
    tuned(tmp_path / "models" / "one")
    command = ["import", "--store", "store", "--from", "models", "--texts", texts(tmp_path, 60), "--rank", 2, "--least", 0]
    command += ["--device", "cpu"]
    assert mentions(refused(capsys, "import", "--store", "store", "--from", "models", "--root", "base", "--plan"), "--texts")
    assert mentions(refused(capsys, *command, "--root", "base", "--domain", "bio"), "--domain bio", "--root")
    assert mentions(refused(capsys, *command, "--root", "base", "--part", "1/2"), "--part 1/2", "hplm build root")
    plan = run(capsys, *command, "--root", "base", "--plan")
    said = printed(capsys, *command, "--root", "base")
    store = Store(tmp_path / "store")
    assert (store.config.lower_layers, store.config.upper_layers, store.tenant_ids()) == (2, 2, ["one"])
    assert store.report(store.tenant("one"))["bytes"]["tenant"] == plan["bytes"]["after"]
    assert said.splitlines()[-1] == "next: hplm export --store store && hplm serve"
    assert mentions(said, "root of backbone base", "n-grams")
    assert run(capsys, *command, "--root", "base")["version"] == 1


def test_an_adapter_becomes_a_tenant_scored_as_it_will_be_served(tmp_path, capsys):
    command = ["import", "--store", make_imported_store(tmp_path), "--device", "cpu", "--labels", ",".join(LABELS)]
    answer = run(capsys, *command, "--id", "acme", "--from", FIXTURES / "peft-tag-patterns")
    assert (answer["tenant"], answer["version"], answer["domain"], answer["task"]) == ("acme", 1, "root", "tag")
    assert (answer["adapter"], answer["labels"]) == ("lora", LABELS)
    test = tmp_path / "test.jsonl"
    test.write_text("\n".join(json.dumps({"text": text, "label": "red"}) for text in some_lines(5, seed=5)))
    lines = printed(capsys, *command, "--id", "beta", "--from", FIXTURES / "peft-pooler", "--test", test).splitlines()
    assert mentions(lines[0], "beta", 1, "lora", 3, "peft LoRA") and mentions(lines[1], "tiny-bert")
    assert mentions(lines[2], "root", "accuracy") and mentions(lines[3], "hplm export", command[2], "hplm serve")
