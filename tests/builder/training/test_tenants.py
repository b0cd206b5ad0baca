"""`hplm build tenants`: a file of tenants, of which what cannot be built is named and what is stored is left alone."""

import json

import pytest

from hplm.cli.main import main
from tests.builder.training.small_tenants import made, write
from tests.cli.commands import refused, run
from tests.support.killed import content
from tests.support.message import mentions

pytestmark = pytest.mark.slow

GOOD = {"id": "acme", "task": "classify", "train": "train.jsonl"}


@pytest.fixture
def folder(tmp_path):
    made(tmp_path, "classify", 40, 1).rename(tmp_path / "train.jsonl")
    return tmp_path


def lines(folder, *given):
    return write(folder / "tenants.jsonl", given)


@pytest.mark.usefixtures("in_this_process", "no_pictures", "one_step")
def test_a_file_of_tenants_is_built_once_and_one_that_cannot_be_is_named(store, folder, capsys):
    """Their files lie beside the file, and not in the current folder."""
    (folder / "bad.jsonl").write_text('{"text": "x"}')
    lora = {"adapter": "lora", "rank": 2, "places": ["query", "key"], "learning_rate": 1e-2, "epochs": 1}
    file = lines(
        folder,
        GOOD | {"rank": 4, "learning-rate": 0.01, "epochs": 1},
        {"id": "wrong", "task": "classify", "train": "bad.jsonl", "dev": None},
        GOOD | {"id": "beta", "dev": "train.jsonl", **lora},
    )
    command = ["build", "tenants", file, "--store", store.folder, "--device", "cpu"]
    answer = run(capsys, *command, status=3)
    assert [(name, one["version"], one["new"]) for name, one in sorted(answer["built"].items())] == [
        ("acme", 1, True), ("beta", 1, True),
    ]  # fmt: skip
    assert mentions(answer["refused"]["wrong"], folder / "bad.jsonl", "label")
    beta = store.tenant("beta")
    assert (beta.adapter, beta.rank, beta.places) == ("lora", 2, ("query", "key"))
    assert store.report(store.tenant("acme"))["learning_rate"] == 0.01
    page = (store.folder / "tenants.html").read_text("utf-8")
    assert all(word in page for word in ("beta", "bad.jsonl"))
    before = content(store.folder)
    answer = run(capsys, *command, status=3)
    assert not any(one["new"] for one in answer["built"].values()) and content(store.folder) == before
    alone = ["build", "tenant", "--id", "acme", "--store", store.folder, "--device", "cpu", "--train", folder / "train.jsonl"]
    same = run(capsys, *alone, "--task", "classify", "--rank", 4, "--learning-rate", 0.01, "--epochs", 1)
    assert same["version"] == 1 and content(store.folder) == before, "the same tenant, by the other command"
    assert main([*map(str, command), "--at-once", "0"]) == 2


@pytest.mark.usefixtures("in_this_process", "no_pictures", "one_step")
def test_parts_are_all_of_it_together(store, folder, capsys):
    names = ["acme", "beta", "city"]
    file = lines(folder, *(GOOD | {"id": name, "epochs": 1, "rank": 2} for name in names))
    command = ["build", "tenants", file, "--store", store.folder, "--device", "cpu", "--part"]
    found = [run(capsys, *command, f"{number}/2") for number in (1, 2)]
    assert [[*one["built"]] for one in found] == [["acme", "city"], ["beta"]] and store.tenant_ids() == names
    assert [one["page"].rpartition("/")[2] for one in found] == ["tenants-1-of-2.html", "tenants-2-of-2.html"]
    for wrong in ("3/2", "1", "0/2", "-1/2", "a/b"):
        assert main([*map(str, command[:-1]), f"--part={wrong}"]) == 2
        assert mentions(capsys.readouterr().err, "--part", wrong, "8/8")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"id": "acme"', ["JSON"]),
        ("[]", ["object"]),
        ({"task": "classify"}, ["--id"]),
        (GOOD | {"id": "A!"}, ["A!", "lower-case"]),
        (GOOD | {"rnak": 4}, ["--rnak", "--rank"]),
        (GOOD | {"rank": "many"}, ["--rank", "many"]),
        (GOOD | {"rank": 1000}, ["1000"]),
        (GOOD | {"rank": {}}, ["rank", "list"]),
        (GOOD | {"adapter": "lorax"}, ["lorax"]),
        (GOOD | {"task": "clasify"}, ["clasify", "classify"]),
        (GOOD | {"task": None}, ["acme", "--task"]),
        (GOOD | {"train": None}, ["--train"]),
        (GOOD | {"train": "nowhere.jsonl"}, ["nowhere.jsonl"]),
        (GOOD | {"domain": "law"}, ["law", "root"]),
        (GOOD | {"teacher": "nobody"}, ["nobody", "--teacher", "checkpoint"]),
        (GOOD | {"upper_rate": 1e-4, "rank": 0}, ["--rank"]),
        (GOOD | {"from_version": 7}, ["7"]),
        (GOOD | {"fresh": True}, ["fresh", "hplm build tenant"]),
        (GOOD | {"store": "other"}, ["store"]),
        (GOOD | {"help": True}, ["help"]),
        (GOOD | {"id": "first"}, ["line 1", "first"]),
    ],
    ids=str,
)
def test_a_wrong_line_is_refused_by_its_number_before_anything_is_trained(store, folder, capsys, line, named):
    text = line if isinstance(line, str) else json.dumps(line)
    file = lines(folder, GOOD | {"id": "first"})
    file.write_text(f"{file.read_text()}\n{text}\n")
    said = refused(capsys, "build", "tenants", file, "--store", store.folder)
    assert mentions(said, "line 3", file, *named) and not store.tenant_ids(), said


def test_a_file_without_tenants_is_refused(store, folder, capsys):
    assert mentions(refused(capsys, "build", "tenants", lines(folder), "--store", store.folder), "tenants.jsonl", '"id"')
    assert mentions(refused(capsys, "build", "tenants", folder / "none", "--store", store.folder), "none")
