"""Commands refuse bad arguments in one line that names the fault and a way out."""

import json
import os

import pytest

from builder.store.store import TenantVersion
from hplm.cli.main import main
from testing.random_store import random_store
from testing.toy import CHAT, CONFIG
from tests.cli.commands import refused
from tests.placement.problems import write_problem
from tests.support.message import mentions
from tests.tasks import make_tasks

pytestmark = pytest.mark.slow
CORE = f"cpu:{min(os.sched_getaffinity(0))}"
NAMES = ("", "Acme", "a/b", "../x", "-a", "a" * 65, "ü")  # which are not safe as folders
NO_STUDENTS = ("--students 17", "--rank 0", "--rank 33", "--learning-rate 0", "--layers 0", "--layers 3")
IN_JSON = json.dumps({"text": "w", "label": "label-0"}) + "\n"


@pytest.fixture(scope="module")
def words(made, built, toy, tmp_path_factory):
    """The words that stand for folders and options in the tables."""
    folder = tmp_path_factory.mktemp("refused")
    random_store(folder / "chat", CHAT, [TenantVersion("plain", 1, "root", 1, "generate", [], 0)], corpus_tokens=100)
    random_store(folder / "empty", CONFIG, [], corpus_tokens=500)
    tasks = make_tasks(folder / "tasks").store.folder
    (folder / "data.jsonl").write_text(IN_JSON * 20)
    (folder / "few.jsonl").write_text('{"text": "w", "label": "yes"}\n' * 99)
    (folder / "same.jsonl").write_text('{"text": "w", "label": 3}\n' * 100)
    (folder / "notes.txt").write_text("mine")
    for name in ("folder.png", "s"):  # a build makes the folder of its store first
        (folder / name).mkdir()
    (folder / "mixed/toy").mkdir(parents=True)
    (folder / "whole/dedicated/1").mkdir(parents=True)
    for name in ("backbone.json", "whole.json"):
        (folder / "whole/dedicated/1" / name).write_text("{}")
    (folder / "mixed/toy/config.pbtxt").write_text('key: "scheme" value { string_value: "shared" }')
    write_problem(folder, rate=40.0)
    repository, store = f"--repository {made}/repository", f"--store {made}/store"
    problem = f"--cluster {folder}/c.json --profiles {folder}/p.json --trace {folder}/t.jsonl"
    searched = f"{problem} --slo-scale 4 --to {folder}/placement.json"
    assert main(f"backup {repository} --state {made}/state --to {folder}/saved".split()) == 0
    return {
        "tmp": folder,
        "store": store,
        "grown": f"--store {built.folder}",
        "places": f"{repository} --state {made}/state",
        "exported": repository,
        "toy": f"--repository {toy.repository}",
        "chat": f"build tenant --store {folder}/chat --id acme",
        "problem": problem,
        "search": f"place search {searched}",
        "simulate": f"place simulate {folder}/now.json {problem} --slo-scale 4",
        "profile": f"place profile --repository {toy.repository} --to {folder}/p2.json",
        "evaluate": f"evaluate {store} --id tenant-3 --test {folder}/data.jsonl",
        "judge": f"evaluate --store {tasks}",
        "calibrate": f"calibrate --store {tasks} --dtype fp32 --id",
        "exits": f"tenant exits --store {tasks} --dtype fp32 --texts {folder}/same.jsonl",
        "students": f"tenant students --store {tasks} --layers 1 --rank 8",
        "root": f"build root --store {folder}/s --model x --corpus {folder}/notes.txt",
        "export": f"export --repository {folder}/r",
        "import": f"import {store} --id new --device cpu --from",
    }


STORES = [
    ("tenant add tenant-0 {store} {places}", ["'tenant-0'", "hplm tenant update"]),
    ("tenant delete nobody {places}", ["'nobody'", "hplm tenant list"]),
    ("tenant limit tenant-0 {places}", ["--rate", "--burst", "--texts-rate", "--tokens-rate"]),
    ("tenant limit tenant-0 --deadline-ms 1e306 {places}", ["'deadline_us'"]),
    ("tenant key add tenant-0 --days -1 {places}", ["'days'", -1.0]),
    ("tenant show nobody {toy}", ["'nobody'", "hplm tenant list"]),
    ("tenant list --repository {tmp}/none", ["{tmp}/none", "--repository"]),
    ("begin --repository {tmp} --state {tmp}/state", ["{tmp}"]),
    ("begin {places} --backbone other", ["other"]),
    ("backup --to {tmp}/saved {places}", ["{tmp}/saved"]),
    ("restore --from {tmp} {places}", ["{tmp}", "backup.json"]),
    ("restore --from {tmp}/saved {toy} --state {tmp}/other", ["{tmp}/saved", "export"]),
    ("domain list", ["--store", "--repository"]),
    ("domain update --name bio {store}", ["--corpus", "--repository", "--state"]),
    ("domain update --name bio {store} {places} --canary 2", ["canary", 2.0]),
    ("domain update --name bio {store} {places} --keep 0.5 --learn distil", ["--keep", "--learn"]),
    ("domain update --name bio {store} --corpus x --canary 0.5", ["--canary"]),
    ("domain delete --name bio {places} --version 1", ["--version"]),
    ("domain delete --name bio {store} --state {tmp}", ["--state"]),
    ("domain delete --name bio {grown}", ["'bio'", "cells", 1, "acme"]),
    ("domain delete --name bio --version 1 {grown}", ["'bio'", 1, "acme"]),
    ("domain inspect --name bio --version 9 {grown}", ["'bio'", 9, 1, 2]),
    ("domain inspect --name law {grown}", ["'law'"]),
    ("domain inspect --name bio --keep 0.1 {grown}", ["--keep", "--text"]),
    ("domain inspect --name bio --text none.txt {grown}", ["none.txt"]),
    ("domain update --name bio --corpus none.txt {grown}", ["none.txt"]),
    ("verify --repository {tmp}", ["{tmp}"]),
    ("verify --store {tmp} --state {tmp}", ["--state", "--repository"]),
    ("verify --repository {tmp}/whole", ["{tmp}/whole/dedicated", "export it again"]),
    ("export --store {tmp} --repository {tmp}/r", ["{tmp}", "hplm build root"]),
    ("export {store} --repository {tmp}/mixed", ["{tmp}/mixed/toy", "'shared'", "'hplm'"]),
    ("build root --store {tmp}/s --model {tmp}/none --corpus {tmp}/notes.txt", ["{tmp}/none"]),
    ("build root {store} --model x --corpus {tmp}/notes.txt", ["--store"]),
    ("{chat} --train x.jsonl", ["x.jsonl"]),
    ("{chat} --dev x.jsonl", ["--dev"]),
    ("{chat} --fresh", ["--fresh"]),
    ("{chat} --from-version 0", ["--from-version"]),
    ("{chat} --rank 8 --epochs 2", ["--rank", "--epochs"]),
    ("{chat} --dtype fp16", ["--dtype"]),
    ("{import} {tmp}/whole --texts x.txt", ["--from {tmp}/whole", "config.json", "adapter_config.json"]),
    ("{evaluate} --against bigger", ["--against", "'bigger'", "dedicated"]),
    ("{evaluate} --ca-file door.pem", ["--ca-file", "--url"]),
    ("{evaluate} --train gone.jsonl --seeds 3", ["--train", "--seeds", "--against"]),
    ("{evaluate} --picture out.txt", ["--picture", "out.txt", ".png", ".svg", ".pdf"]),
    ("{evaluate} --picture {tmp}/folder.png", ["--picture", "{tmp}/folder.png"]),
    ("generate --tenant x a --sampling [1]", ["--sampling"]),
    *((f"generate --tenant x {given}", ["--chat"]) for given in ("", "a --chat b", "a --system b")),
    *((f"infer --tenant x a {given}", [given.split()[1]]) for given in ("--deadline-ms 0.0", "--url http://somewhere")),
]
UNFIT = [  # for a tenant, a training or an engine
    ("{calibrate} nobody --texts few.jsonl", ["'nobody'"]),
    ("{calibrate} pair --texts few.jsonl", ["few.jsonl", 99, 100]),
    ("{calibrate} pair --texts data.jsonl", ["data.jsonl", "'label-0'"]),
    ("{calibrate} word --texts few.jsonl", ["few.jsonl", "`tokens`"]),
    ("{calibrate} mark --texts same.jsonl", ["'mark'", "regress", "confidence"]),
    ("{calibrate} near --texts same.jsonl", ["'near'", "embed", "confidence"]),
    ("{judge} --id near --test absent.jsonl --against plot", ["--against", "'near'", "vectors"]),
    ("{judge} --id mark --test absent.jsonl --picture a.png", ["--picture", "'mark'", "regress"]),
    ("{exits} find", ["'find'", "windows"]),
    ("{exits} pair --drop 2 1", ["2.0, 1.0"]),
    ("{exits} pair --drop -1", ["-1.0"]),
    ("{exits} mark", ["'mark'", "numbers"]),
    ("{exits} near", ["'near'", "vectors"]),
    ("{students} near", ["'near'", "embed"]),
    (
        "build tenant {store} --id new --train {tmp}/data.jsonl --task classify --dimensions 8",
        ["dimensions", "embed", "classify"],
    ),
    ("build tenant {store} --id new --train {tmp}/data.jsonl --task embed --dimensions 33", ["--dimensions", 33, 32]),
    ("build tenant {store} --id new --train {tmp}/data.jsonl --task embed --rank 0", ["'new'", "--rank"]),
    ("{exits} many", ["same.jsonl", "same"]),
    *((f"{{exits}} pair {option}", [option.split()[1]]) for option in ("--picture a.txt", "--texts absent")),
    *((f"{command} --seed {seed}", [f"seed {seed}"]) for command in ("{exits} pair", "{root}") for seed in (-1, 2**64)),
    *((f"{{students}} pair {option}", [option]) for option in NO_STUDENTS),
    ("{students} find", ["'find'", "span"]),
    ("build domain {store} --name new --corpus notes.txt --seed -1", ["seed -1"]),
    ("domain update {grown} --name bio --corpus notes.txt --seed -1", ["seed -1"]),
    *((f"{{root}} {option}", [option]) for option in ("--minutes -1", "--minutes inf", "--minutes nan", "--steps -1")),
    ("{root} --until 94", ["--until 94"]),
    *((f"build tenant {{store}} --id={name} --task tag --train x", [repr(name)]) for name in NAMES),
    ("{export} --store {tmp}/empty", ["{tmp}/empty", "hplm build tenant"]),
    ("{export} {store} --parameters batch_tokens=10", ["batch_tokens", 10, 64]),
    ("{export} {store} --parameters packing=dense", ["packing", "'dense'"]),
    ("{export} {store} --parameters batch_tokens", ["--parameters batch_tokens", "NAME=VALUE"]),
    ("{export} {store} --parameters batch_token=512", ["batch_token=512", "batch_tokens"]),
    ("{export} {store} --parameters batch_tokens=many", ["batch_tokens", "'many'"]),
    ("{export} {store} --parameters dtype=fp32", ["--parameters dtype=fp32"]),
    ("{export} {store} --parameters max_sequences=3", ["--parameters max_sequences=3"]),
    ("{export} --store {tmp}/chat --dtype int8", ["int8"]),
    (f"{{export}} --store {{tmp}}/chat --parameters cache_tokens={CHAT.positions - 1}", ["cache_tokens", CHAT.positions]),
    ("{export} --store {tmp}/chat --parameters cache_tokens=255", ["cache_tokens", 256]),  # a block on CUDA
]
PLACING = [
    *(
        (f"{{profile}} --devices {devices}", named)
        for devices, named in (
            ("CORE,CORE", [CORE, "twice"]),
            ("cpu:99999", [99999, CORE.removeprefix("cpu:")]),
            ("tpu:0", ["tpu:0"]),
            ("CORE,cuda:0", ["cuda:0", "kinds"]),
            ("CORE --intra 2", ["--intra 2"]),
            ("CORE --intra 1,1", ["--intra"]),
        )
    ),
    ("{profile} --devices CORE --to {tmp}/none/p.json", ["{tmp}/none"]),
    ("{profile} --devices CORE --repository {tmp}", ["{tmp}", "hplm export"]),
    ("place emit {toy} --placement {tmp}/none.json --to {tmp}/groups", ["{tmp}/none.json", "hplm place search"]),
    ("place search {problem} --to {tmp}/placement.json", ["--slo-scale", "deadline"]),
    ("{search} --slo-scale 0.001", ["--slo-scale", "b0"]),
    ("{search} --search wide", ["wide", "beam:K"]),
    ("{search} --hot b0/z", ["b0/z"]),
    ("{search} --to {tmp}/none/placement.json", ["{tmp}/none", "--to"]),
    ("{simulate} --seconds 0.0001", ["--seconds", "0.0001"]),
    ("{simulate} --parameters batch=3", ["batch", "batch_texts"]),
    ("{simulate} --hot b1/a", ["now.json", "--hot"]),
    ("place simulate {tmp}/now.json {problem}", ["--slo-scale", "deadline"]),
    *((f"{{search}} --to {{tmp}}/{file}", ["--to", file]) for file in ("c.json", "p.json", "t.jsonl", "notes.txt")),
]


def content(folder):
    """Returns the bytes of files, and the names of folders."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


@pytest.mark.parametrize("command, named", [*STORES, *UNFIT, *PLACING], ids=lambda one: one if isinstance(one, str) else "")
def test_what_is_wrong_is_named_in_one_line_and_nothing_is_written(words, capsys, monkeypatch, command, named):
    monkeypatch.chdir(words["tmp"])
    before = content(words["tmp"])
    *progress, said = refused(capsys, *command.format(**words).replace("CORE", CORE).split()).splitlines()
    assert said.startswith("hplm ") and mentions(said, *(str(one).format(**words) for one in named))
    shown = "screens", "are divided", "reading"
    assert all(any(word in line for word in shown) for line in progress if line.strip())
    assert content(words["tmp"]) == before
