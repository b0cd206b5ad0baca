"""`hplm build stack`: the stack is in the store, the same command changes nothing, and a killed build continues."""

import json
from dataclasses import replace

import pytest

from builder.adaptation.learning import Budget
from builder.store.store import Store
from builder.store.verification import store_parts
from builder.tables.stack import StackOptions, build_stack
from hplm.cli.main import main, parser
from hplm.errors import InvalidInput
from hplm.model.windows import TRIGRAMS
from testing.random_store import random_store, random_table
from testing.toy import CHAT, CONFIG
from tests.builder.tables.branches import CPU, make_store
from tests.builder.tables.test_domain import corpus
from tests.support.killed import content
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

STEPS = Budget(steps=2)


@pytest.fixture
def store(tmp_path):
    return rooted(tmp_path)


def rooted(folder) -> Store:
    folder.mkdir(exist_ok=True)
    store = make_store(folder, TRIGRAMS)
    random_table(store, "root", 1, None, 1000, seed=1)
    return store


def test_a_built_stack_is_in_the_store_with_its_report_and_picture(store, tmp_path, capsys):
    build = ["build", "stack", "--store", store.folder, "--name", "small", "--corpus", corpus(tmp_path, 1), "--steps", 2]
    before = content(store.folder)
    assert main([*map(str, build), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (told["stack"], told["layers"], told["full"], told["steps"]) == ("small", 1, CONFIG.upper_layers, 2)
    after = content(store.folder)
    files = {"stacks/small.safetensors", "stacks/small.json", "stacks/small.png"}
    assert after.keys() - before.keys() == files and before.items() <= after.items()
    report = store.stack_report("small")
    assert report["at_end"] == told["at_end"] and report["started_from"] == told["started_from"] and report["curve"]
    assert len(store.stack("small").layers) == 1 and after["stacks/small.png"].startswith(b"\x89PNG")
    assert not [wrong for part in store_parts(store.folder) for wrong in part.check(part.path, lambda done: None)]
    assert main(list(map(str, build))) == 0
    assert mentions(capsys.readouterr().out, "small", 1, CONFIG.upper_layers, store.stack_file("small", ".json"))
    assert content(store.folder) == after


def test_another_command_does_not_replace_a_stack(store, tmp_path):
    first = build_stack(store, "small", [corpus(tmp_path, 1)], StackOptions(), STEPS, CPU)
    before = content(store.folder)
    others = [
        (corpus(tmp_path, 2), StackOptions(), STEPS),
        (corpus(tmp_path, 1), StackOptions(seed=1), STEPS),
        (corpus(tmp_path, 1), StackOptions(), Budget(steps=3)),
    ]
    for text, options, budget in others:
        with pytest.raises(InvalidInput, match=mentioning("'small'", "--name", store.folder / "stacks")):
            build_stack(store, "small", [text], options, budget, CPU)
    assert build_stack(store, "small", [corpus(tmp_path, 1)], StackOptions(), STEPS, CPU) == first
    assert content(store.folder) == before
    build_stack(store, "other", [corpus(tmp_path, 2)], StackOptions(), STEPS, CPU)
    assert store.stacks() == ["other", "small"]


@pytest.mark.parametrize("layers", [0, -1, CONFIG.upper_layers, 9])
def test_impossible_layers_are_refused(store, tmp_path, layers):
    before = content(store.folder)
    with pytest.raises(InvalidInput, match=mentioning("--layers", layers, CONFIG.upper_layers)):
        build_stack(store, "small", [corpus(tmp_path, 1)], StackOptions(layers), STEPS, CPU)
    assert content(store.folder) == before


def test_backbones_without_shorter_stacks_are_refused(tmp_path):
    chat = random_store(tmp_path / "chat", CHAT, [], corpus_tokens=500)
    with pytest.raises(InvalidInput, match=mentioning("'chat'", "decoder")):
        build_stack(chat, "small", [corpus(tmp_path, 1)], StackOptions(), STEPS, CPU)
    flat = random_store(tmp_path / "flat", replace(CONFIG, name="flat", upper_layers=1), [], corpus_tokens=500)
    with pytest.raises(InvalidInput, match=mentioning("'flat'", "single")):
        build_stack(flat, "small", [corpus(tmp_path, 1)], StackOptions(), STEPS, CPU)


def test_bad_names_and_corpora_are_refused_and_bind_nobody(store, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    before = content(store.folder)
    for name, text, named in (
        ("No Name", corpus(tmp_path, 1), "'No Name'"),
        ("small", empty, empty),
        ("small", "none", "none"),
    ):
        with pytest.raises((InvalidInput, OSError), match=mentioning(named)):
            build_stack(store, name, [tmp_path / text], StackOptions(), STEPS, CPU)
        assert content(store.folder) == before


def test_an_unfinished_root_has_no_stacks(tmp_path):
    store = make_store(tmp_path, TRIGRAMS)
    with pytest.raises(InvalidInput, match=mentioning("'root'", store.folder)):
        build_stack(store, "small", [corpus(tmp_path, 1)], StackOptions(), STEPS, CPU)


def test_the_command_has_a_help_text(capsys):
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["build", "stack", "--help"])
    assert ended.value.code == 0 and "--until" in capsys.readouterr().out
