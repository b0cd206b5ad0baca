"""Decoders in a store: roots without lower layers or with tables of causal windows, and LoRAs as `peft` writes them."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from builder.importing.adapter_import import ImportOptions, import_tenant, plain_tenant
from builder.importing.folders import Importer
from builder.importing.options import Matching
from builder.publish.export import write_version
from builder.store.pack import pack_root, unpack_root
from builder.store.seen import SeenTexts
from builder.tables.domain import DomainOptions, UpdateOptions, build_domain, update_domain
from builder.tables.root import RootOptions, build_root
from hplm.engine.backbone import Backbone
from hplm.errors import InvalidInput
from hplm.model.windows import Window
from tests.builder.stores import NO_TIME, decoder_store, give_other_values, rows
from tests.cli.commands import printed, refused, run
from tests.model.decoders import MADE, VOCABULARY, drawn, llama, saved, tokens
from tests.support.device import DEVICE
from tests.support.generative import GenerativeReference
from tests.support.message import mentioning, mentions

RANK, ALPHA = 3, 6
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj", "v_proj"],
    "gpt2": ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
}
TEXTS = "the quick brown fox\njumps over the lazy dog\nthe quick dog\n"


@pytest.fixture
def folder(tmp_path):
    return saved(drawn(llama()), tmp_path / "tiny")


def logits(store, folder, text, tenant):
    """Returns those of the reference, which reads an export of the store."""
    write_version(store, store.tenants(), folder)
    return GenerativeReference(Backbone(folder)).logits(text, tenant)


@torch.no_grad()
def test_a_table_of_windows_comes_from_a_corpus(folder, tmp_path):
    (corpus := tmp_path / "corpus.txt").write_text(TEXTS, "utf-8")
    options = RootOptions(lower=2, window=Window(3))
    store, table = build_root(folder, [corpus], tmp_path / "store", options, NO_TIME, DEVICE)
    assert store.config.window == Window(3, causal=True) and table.meta.window.vectors == 1
    plain_tenant(store, "chat")
    short, longer = (ids.tolist() for ids in store.tokenizer().encode_documents(["the", "the quick dog"]))
    model = drawn(llama())
    for number, (text, close) in enumerate(((short, 0.05), (longer, 0.5))):  # windows see all of the short text, in 16 bits
        found = logits(store, tmp_path / str(number), text, "chat")
        assert torch.allclose(found, model(torch.tensor([text])).logits[0], atol=close) == (text is short)
    (more := tmp_path / "more.txt").write_text("the lazy fox\n", "utf-8")
    branch = build_domain(store, "foxes", [more], DomainOptions(min_tokens=1), NO_TIME, DEVICE)
    assert branch.meta.parent == "root" and branch.meta.keys > 0
    assert update_domain(store, "foxes", [corpus], UpdateOptions(), NO_TIME, DEVICE).meta.keys > branch.meta.keys


def test_what_a_decoder_cannot_have_is_refused(folder, tmp_path):
    for number, lower in enumerate((1, None)):
        with pytest.raises(InvalidInput, match=mentioning("--corpus", "--lower 0")):
            build_root(folder, [], tmp_path / f"s{number}", RootOptions(lower=lower), NO_TIME, DEVICE)
    store = decoder_store(folder, tmp_path / "store")
    with pytest.raises(InvalidInput, match=mentioning("tiny", "root")):
        build_domain(store, "law", [], DomainOptions(), NO_TIME, DEVICE)
    (corpus := tmp_path / "corpus.txt").write_text(TEXTS, "utf-8")
    with pytest.raises(InvalidInput, match=mentioning(store.counts_folder("root", 1), "again, with --corpus")):
        update_domain(store, "root", [corpus], UpdateOptions(), NO_TIME, DEVICE)
    pack_root(store, tmp_path / "root.tar")
    assert unpack_root(tmp_path / "root.tar", tmp_path / "there").domains() == [("root", 1)]


def test_commands_make_a_decoder_and_its_tenant(folder, tmp_path, capsys):
    at = "--store", tmp_path / "store"
    for _ in range(2):  # the second time it is there
        assert run(capsys, "build", "root", "--model", folder, "--lower", 0, *at)["ngrams"] == VOCABULARY
    asked = ["build", "tenant", *at, "--id", "base", "--task"]
    refused(capsys, *asked, "classify", "--train", "x.jsonl")
    for _ in range(2):
        assert run(capsys, *asked, "generate") == {"tenant": "base", "version": 1, "task": "generate"}
    printed(capsys, "verify", *at)


@torch.no_grad()
def adapted(model, folder, targets, layers=range(4), **options):
    """Draws a LoRA, saves it as peft does, and merges it into the model."""
    generator, stored = torch.Generator().manual_seed(0), {}
    for name, module in model.named_modules():
        number = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        if number not in layers or not name.endswith(tuple(targets)):
            continue
        is_transposed = type(module).__name__ == "Conv1D"
        outputs, inputs = module.weight.T.shape if is_transposed else module.weight.shape
        a, b = (0.2 * torch.randn(shape, generator=generator).half() for shape in ((RANK, inputs), (outputs, RANK)))
        change = (b.float() * ALPHA / RANK).half().float() @ a.float()
        module.weight += change.T if is_transposed else change
        stored |= {f"base_model.model.{name}.lora_{part}.weight": tensor.float() for part, tensor in (("A", a), ("B", b))}
    folder.mkdir()
    save_file(stored, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_alpha": ALPHA, "r": RANK, "fan_in_fan_out": False}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **options}), "utf-8")
    return folder


@pytest.mark.parametrize("family", TARGETS)
@torch.no_grad()
def test_an_imported_adapter_is_the_merged_model(family, tmp_path):
    model = drawn(MADE[family]())
    store = decoder_store(saved(model, tmp_path / "m"), tmp_path / "store")
    folder = adapted(model, tmp_path / "lora", TARGETS[family], fan_in_fan_out=family == "gpt2")
    tenant, report = import_tenant(store, "acme", folder, ImportOptions(task="generate"), DEVICE)
    assert (tenant.task, tenant.labels, tenant.rank, tenant.has_head) == ("generate", [], RANK, False)
    assert report["imported"]["library"] == "peft LoRA"
    text = tokens(12)
    assert torch.allclose(logits(store, tmp_path / "1", text, "acme"), model(torch.tensor([text])).logits[0], atol=1e-3)
    again, _ = import_tenant(store, "acme", folder, ImportOptions(), DEVICE)
    assert again.version == 2
    (plan,) = Importer(store, ImportOptions(), Matching(), None, DEVICE).plan([("acme", folder)])
    assert not plan.refused


@torch.no_grad()
def test_a_tenant_goes_on_with_its_domains_newest_tables(tmp_path, capsys):
    model, corpus = drawn(MADE["llama"]()), tmp_path / "corpus.txt"
    corpus.write_text("abc\nabd\n", "utf-8")
    store = decoder_store(saved(model, tmp_path / "m"), tmp_path / "store", lower=2, texts=[corpus])
    folder = adapted(model, tmp_path / "lora", TARGETS["llama"])
    with pytest.raises(
        InvalidInput, match=mentioning(folder / "adapter_model.safetensors", "layers_to_transform", "--lower 0")
    ):
        import_tenant(store, "acme", folder, ImportOptions(), DEVICE)
    build_domain(store, "law", [corpus], DomainOptions(min_tokens=1), NO_TIME, DEVICE)
    upper = adapted(model, tmp_path / "upper", TARGETS["llama"], layers=(2, 3))
    tenant, _ = import_tenant(store, "acme", upper, ImportOptions("law"), DEVICE)
    again = ["build", "tenant", "--id", "acme", "--store", store.folder]
    printed(capsys, *again)
    assert store.tenant("acme") == tenant
    seen = SeenTexts(frozenset({1, 2}), frozenset({3}))
    seen.save(store.tenant_folder("acme", 1) / "seen.npz")
    give_other_values(store, "law", 1)
    updated = update_domain(store, "law", [corpus], UpdateOptions(), NO_TIME, DEVICE)
    assert rows(store.table("law", 1)).items() <= rows(updated).items()  # nothing has learned, so no row is computed again
    printed(capsys, *again)
    assert store.tenant("acme") == replace(tenant, version=2, domain_version=2) and store.seen(store.tenant("acme")) == seen
    weights = [store.tenant_weights(store.tenant_version("acme", version))[0] for version in (1, 2)]
    assert all(torch.equal(old[name], new[name]) for old, new in zip(*weights, strict=True) for name in old)


@pytest.mark.parametrize(
    "target, config, options, named",
    [
        ("q_proj", {"task_type": "SEQ_CLS"}, {}, ["lora", "'SEQ_CLS'"]),
        ("q_proj", {"use_dora": True}, {}, ["lora", "use_dora"]),
        ("embed_tokens", {}, {}, ["embed_tokens"]),
        ("q_proj", {}, {"task": "tag"}, ["'tag'", "'tiny'"]),
        ("q_proj", {}, {"labels": ["a"]}, ["--labels"]),
    ],
)
def test_what_cannot_be_imported_is_named(folder, tmp_path, target, config, options, named):
    store = decoder_store(folder, tmp_path / "store")
    adapter = adapted(drawn(llama()), tmp_path / "lora", [target], (*range(4), None), **config)
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        import_tenant(store, "acme", adapter, ImportOptions(**options), DEVICE)
    (plan,) = Importer(store, ImportOptions(**options), Matching(), None, DEVICE).plan([("acme", adapter)])
    assert mentions(plan.refused, *named)
