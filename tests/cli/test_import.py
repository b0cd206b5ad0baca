"""`hplm import` as a user meets it."""

import json

import pytest

from builder.store.store import Store
from hplm.cli.main import main
from tests.builder.importing.stores import FIXTURES, LABELS, make_imported_store
from tests.builder.tables.branches import some_lines
from tests.builder.tables.test_domain import corpus
from tests.support.message import mentions

pytestmark = pytest.mark.slow


@pytest.fixture
def command(tmp_path):
    return ["import", "--store", make_imported_store(tmp_path), "--id", "acme", "--device", "cpu", "--from"]


def run(*arguments):
    return main(list(map(str, arguments)))


def test_labels_and_task_come_from_the_files(command, capsys):
    assert run(*command, FIXTURES / "adapters-lora-tag", "--json") == 0
    answer = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (answer["tenant"], answer["version"], answer["domain"], answer["task"]) == ("acme", 1, "root", "tag")
    assert (answer["adapter"], answer["rank"], answer["labels"]) == ("lora", 4, LABELS)
    assert answer["imported"]["library"] == "adapters lora"


def test_a_lora_on_every_layer_becomes_a_domain_and_a_tenant(command, capsys, tmp_path):
    given = [*command, FIXTURES / "peft-lower", "--labels", ",".join(LABELS)]
    assert run(*given) == 1
    assert "hplm import: " in (refusal := capsys.readouterr().err) and mentions(refusal, "--as-domain", "--corpus")
    test = tmp_path / "test.jsonl"
    test.write_text("\n".join(json.dumps({"text": text, "label": "red"}) for text in some_lines(5, seed=5)))
    domain = ["--as-domain", "low", "--corpus", corpus(tmp_path, 1), "--min-tokens", 1]
    assert run(*given, *domain, "--test", test) == 0
    lines = capsys.readouterr().out.splitlines()
    assert mentions(lines[0], "acme", 1, "lora", 2, 3, "peft LoRA") and mentions(lines[1], "tiny-bert")
    assert mentions(lines[2], "low", "0, 1", "MB")
    assert mentions(lines[3], "root", "accuracy") and mentions(lines[4], "low", "accuracy") and len(lines) == 5
    assert Store(command[2]).tenants()[0].domain == "low"


def test_options_of_a_domain_are_refused_without_one(command, capsys):
    assert run(*command, FIXTURES / "adapters-lora-tag", "--keep", "0.5", "--min-tokens", 1) == 1
    assert mentions(capsys.readouterr().err, "--keep", "--min-tokens", "--as-domain")


def test_a_domain_needs_a_corpus(command, capsys):
    assert run(*command, FIXTURES / "peft-lower", "--as-domain", "low") == 1
    assert mentions(capsys.readouterr().err, "--as-domain", "--corpus")
