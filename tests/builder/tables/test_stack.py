"""`hplm build stack`: the stack is in the store, the same command changes nothing, and a killed build continues."""

import json

import pytest

from builder.adaptation.learning import Budget
from builder.store.store import Store
from builder.store.verification import store_parts
from builder.tables.stack import StackOptions, build_stack
from hplm.cli.main import main
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


def test_another_command_does_not_replace_a_stack_and_what_is_refused_binds_nobody(store, tmp_path):
    first = build_stack(store, "small", [corpus(tmp_path, 1)], StackOptions(), STEPS, CPU)
    before, empty = content(store.folder), tmp_path / "empty.txt"
    empty.write_text("\n")
    taken = ["'small'", "--name", store.folder / "stacks"]
    wrong = [
        ("small", corpus(tmp_path, 2), StackOptions(), taken),
        ("small", corpus(tmp_path, 1), StackOptions(seed=1), taken),
        *(("other", corpus(tmp_path, 1), StackOptions(layers), ["--layers", layers]) for layers in (0, CONFIG.upper_layers)),
        ("No Name", corpus(tmp_path, 1), StackOptions(), ["'No Name'"]),
        ("other", empty, StackOptions(), [empty]),
    ]
    for name, text, options, named in wrong:
        with pytest.raises(InvalidInput, match=mentioning(*named)):
            build_stack(store, name, [text], options, STEPS, CPU)
    assert build_stack(store, "small", [corpus(tmp_path, 1)], StackOptions(), STEPS, CPU) == first
    assert content(store.folder) == before


def test_decoders_and_unfinished_roots_have_no_stacks(tmp_path):
    chat, unfinished = random_store(tmp_path / "chat", CHAT, [], corpus_tokens=500), make_store(tmp_path, TRIGRAMS)
    for store, named in ((chat, ["'chat'", "decoder"]), (unfinished, ["'root'", unfinished.folder])):
        with pytest.raises(InvalidInput, match=mentioning(*named)):
            build_stack(store, "small", [corpus(tmp_path, 1)], StackOptions(), STEPS, CPU)
