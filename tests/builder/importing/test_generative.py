"""LoRAs of decoders, in the files that `peft` writes."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from builder.importing.lower import NewDomain
from builder.importing.tenant import ImportOptions, import_tenant
from builder.learning.limits import Budget
from builder.publish.export import write_version
from builder.tables.domain import UpdateOptions, update_domain
from builder.tables.table import build_table
from hplm.cli.main import main
from hplm.errors import InvalidInput
from testing.generative import GenerativeReference
from tests.builder.stores import CPU, decoder_store
from tests.model.decoders import MADE, drawn, saved, tokens
from tests.support.message import mentioning

RANK, ALPHA = 3, 6
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
}


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
    tenant, report = import_tenant(store, "acme", folder, ImportOptions(task="generate"), CPU)
    assert (tenant.task, tenant.labels, tenant.rank, tenant.has_head) == ("generate", [], RANK, False)
    assert report["imported"]["library"] == "peft LoRA"
    write_version(store, store.tenants(), tmp_path / "1")
    text = tokens(12)
    found = GenerativeReference.open(tmp_path / "1").logits(text, "acme")
    assert torch.allclose(found, model(torch.tensor([text])).logits[0], atol=1e-3)
    again, _ = import_tenant(store, "acme", folder, ImportOptions(), CPU)
    assert again.version == 2


@torch.no_grad()
def test_the_lower_part_of_an_adapter_becomes_a_domain(tmp_path, monkeypatch):
    model, corpus = drawn(MADE["llama"]()), tmp_path / "corpus.txt"
    corpus.write_text("abc\nabd\n", "utf-8")
    store = decoder_store(saved(model, tmp_path / "m"), tmp_path / "store", lower=2, texts=[corpus])
    folder = adapted(model, tmp_path / "lora", TARGETS["llama"])
    with pytest.raises(InvalidInput, match=mentioning(folder / "adapter_model.safetensors", "--as-domain")):
        import_tenant(store, "acme", folder, ImportOptions(), CPU)
    options = ImportOptions(new_domain=NewDomain("law", [corpus], min_tokens=1))
    tenant, _ = import_tenant(store, "acme", folder, options, CPU)
    assert tenant.domain == "law"
    write_version(store, store.tenants(), tmp_path / "1")
    (text,) = store.tokenizer().encode_documents(["abc"])
    found = GenerativeReference.open(tmp_path / "1").logits(text.tolist(), "acme")
    assert torch.allclose(found, model(torch.tensor([text.tolist()])).logits[0], atol=0.05)

    assert main(["build", "tenant", "--id", "acme", "--store", str(store.folder)]) == 0 and store.tenant("acme") == tenant
    known = []
    monkeypatch.setattr("builder.tables.domain.build_table", lambda *given: known.append(given[-1]) or build_table(*given))
    update_domain(store, "law", [corpus], UpdateOptions(), Budget(steps=1), CPU)
    assert known[0].meta.version == 1  # nothing has learned, so no row is computed again
    assert main(["build", "tenant", "--id", "acme", "--store", str(store.folder)]) == 0
    assert store.tenant("acme") == replace(tenant, version=2, domain_version=2) and tenant.rank == RANK
    weights = [store.tenant_weights(store.tenant_version("acme", version))[0] for version in (1, 2)]
    assert all(torch.equal(old[name], new[name]) for old, new in zip(*weights, strict=True) for name in old)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The store of a decoder, which refusals do not change."""
    folder = tmp_path_factory.mktemp("plain")
    return decoder_store(saved(drawn(MADE["llama"]()), folder / "m"), folder / "store")


@pytest.mark.parametrize(
    "target, config, options, named",
    [
        ("q_proj", {"task_type": "SEQ_CLS"}, {}, ["lora", "'SEQ_CLS'"]),
        ("q_proj", {"use_dora": True}, {}, ["lora", "use_dora"]),
        ("embed_tokens", {}, {}, ["embed_tokens"]),
        ("q_proj", {}, {"task": "tag"}, ["'tag'", "'m'"]),
        ("q_proj", {}, {"labels": ["a"]}, ["--labels"]),
    ],
)
def test_what_cannot_be_imported_is_named(plain, tmp_path, target, config, options, named):
    folder = adapted(drawn(MADE["llama"]()), tmp_path / "lora", [target], (*range(4), None), **config)
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        import_tenant(plain, "acme", folder, ImportOptions(**options), CPU)


def test_an_encoder_imports_no_decoder(toy, tmp_path):
    with pytest.raises(InvalidInput, match=mentioning("'generate'", "'toy'")):
        import_tenant(toy.store, "new", tmp_path, ImportOptions(task="generate"), CPU)
