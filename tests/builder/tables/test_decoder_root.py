"""Roots of decoders: without lower layers and corpus, or with an untrained table of causal windows."""

import json

import pytest
import torch

from builder.importing.generative import plain_tenant
from builder.learning.limits import Budget
from builder.publish.export import export, write_version
from builder.publish.model_configs import ALIAS, ServingOptions
from builder.store.pack import pack_root, unpack_root
from builder.store.store import Store
from builder.tables.domain import DomainOptions, UpdateOptions, build_domain, update_domain
from builder.tables.root import RootOptions, build_root
from hplm.cli.main import main
from hplm.errors import InvalidInput
from hplm.model.windows import Window
from testing.generative import GenerativeReference
from tests.builder.stores import CPU, NO_TIME, decoder_store
from tests.model.decoders import VOCABULARY, drawn, llama, saved
from tests.support.message import mentioning, mentions

TENANT = "chat"
TEXTS = "the quick brown fox\njumps over the lazy dog\nthe quick dog\n"


@pytest.fixture(scope="module")
def model():
    return drawn(llama())


@pytest.fixture
def folder(model, tmp_path):
    return saved(model, tmp_path / "tiny")


def reference(store, folder):
    plain_tenant(store, TENANT)
    write_version(store, store.tenants(), folder / "1")
    return GenerativeReference.open(folder / "1")


def test_a_table_of_windows_comes_from_a_corpus(model, folder, tmp_path, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(TEXTS, "utf-8")
    options = RootOptions(lower=2, window=Window(3))
    store, table = build_root(folder, [corpus], tmp_path / "store", options, Budget(minutes=5), CPU)
    assert store.config.window == Window(3, causal=True) and table.meta.window.vectors == 1
    ours = reference(store, tmp_path / "out")
    short, longer = (ids.tolist() for ids in store.tokenizer().encode_documents(["the", "the quick dog"]))
    with torch.no_grad():  # its windows see all of so short a text, and have 16 bits
        assert torch.allclose(ours.logits(short, TENANT), model(torch.tensor([short])).logits[0], atol=0.05)
        assert not torch.allclose(ours.logits(longer, TENANT), model(torch.tensor([longer])).logits[0], atol=0.5)
    more = tmp_path / "more.txt"
    more.write_text("the lazy fox\n", "utf-8")
    branch = build_domain(store, "foxes", [more], DomainOptions(min_tokens=1), Budget(minutes=5), CPU)
    assert branch.meta.parent == "root" and branch.meta.keys > 0 and mentions(capsys.readouterr().err, "foxes", "decoder")
    assert update_domain(store, "foxes", [corpus], UpdateOptions(), Budget(minutes=5), CPU).meta.keys > branch.meta.keys


def test_what_a_decoder_cannot_have_is_refused(folder, tmp_path):
    for number, lower in enumerate((1, None)):
        with pytest.raises(InvalidInput, match=mentioning("--corpus", "--lower 0")):
            build_root(folder, [], tmp_path / f"s{number}", RootOptions(lower=lower), NO_TIME, CPU)
    store = decoder_store(folder, tmp_path / "store")
    with pytest.raises(InvalidInput, match=mentioning("tiny", "root")):
        build_domain(store, "law", [], DomainOptions(), NO_TIME, CPU)
    pack_root(store, tmp_path / "root.tar")
    assert unpack_root(tmp_path / "root.tar", tmp_path / "there").domains() == [("root", 1)]


def test_commands_make_a_decoder_and_its_tenant(folder, tmp_path, capsys):
    store = str(tmp_path / "store")
    assert main(["build", "root", "--model", folder, "--lower", "0", "--store", store, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ngrams"] == VOCABULARY
    asked = ["build", "tenant", "--store", store, "--id", "base", "--task"]
    assert main([*asked, "classify", "--train", "x.jsonl"]) != 0
    assert main([*asked, "generate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tenant": "base", "version": 1, "task": "generate"}
    assert main([*asked, "generate"]) == 0 and Store(tmp_path / "store").tenant_versions("base") == [1]
    assert main(["verify", "--store", store]) == 0
    export(Store(tmp_path / "store"), tmp_path / "repository", ServingOptions())
    assert {path.parent.name for path in (tmp_path / "repository").glob("*/config.pbtxt")} == {"tiny", ALIAS}
