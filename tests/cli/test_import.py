"""`hplm import` as a user meets it."""

import json

import pytest

from builder.store.store import Store
from tests.builder.importing.stores import FIXTURES, LABELS, make_imported_store
from tests.builder.stores import corpus, some_lines
from tests.cli.commands import printed, refused, run
from tests.support.message import mentions

pytestmark = pytest.mark.slow


def test_an_adapter_becomes_a_tenant_and_one_on_every_layer_a_domain_as_well(tmp_path, capsys):
    command = ["import", "--store", make_imported_store(tmp_path), "--device", "cpu"]
    answer = run(capsys, *command, "--id", "acme", "--from", FIXTURES / "adapters-lora-tag")
    assert (answer["tenant"], answer["version"], answer["domain"], answer["task"]) == ("acme", 1, "root", "tag")
    assert (answer["adapter"], answer["rank"], answer["labels"]) == ("lora", 4, LABELS)
    assert answer["imported"]["library"] == "adapters lora"
    given = [*command, "--id", "beta", "--from", FIXTURES / "peft-lower", "--labels", ",".join(LABELS)]
    assert mentions(refused(capsys, *given), "--as-domain", "--corpus")
    test = tmp_path / "test.jsonl"
    test.write_text("\n".join(json.dumps({"text": text, "label": "red"}) for text in some_lines(5, seed=5)))
    domain = ["--as-domain", "low", "--corpus", corpus(tmp_path, 1), "--min-tokens", 1]
    lines = printed(capsys, *given, *domain, "--test", test).splitlines()
    assert mentions(lines[0], "beta", 1, "lora", 2, 3, "peft LoRA") and mentions(lines[1], "tiny-bert")
    assert mentions(lines[2], "low", "0, 1", "MB")
    assert mentions(lines[3], "root", "accuracy") and mentions(lines[4], "low", "accuracy") and len(lines) == 5
    assert {tenant.id: tenant.domain for tenant in Store(command[2]).tenants()} == {"acme": "root", "beta": "low"}
