"""`hplm build tenant` in the store of a decoder, whose tenants do not learn."""

import pytest

from builder.store.store import Store
from hplm.cli.main import main
from testing.random_store import random_store
from testing.toy import CHAT
from tests.support.message import mentions


@pytest.mark.parametrize(
    "given", ["--train x.jsonl", "--dev x.jsonl", "--fresh", "--from-version 1", "--rank 8 --epochs 2 --grid", "--dtype fp16"]
)
def test_options_of_training_are_refused_for_a_decoder(given, tmp_path, capsys):
    random_store(tmp_path, CHAT, [], corpus_tokens=100)
    command = ["build", "tenant", "--store", str(tmp_path), "--id", "acme"]
    assert main([*command, *given.split()]) == 1
    assert mentions(capsys.readouterr().err, *(word for word in given.split() if word.startswith("--")))
    assert main(command) == 0 and [tenant.id for tenant in Store(tmp_path).tenants()] == ["acme"]
