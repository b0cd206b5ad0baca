"""Imported LoRAs of `peft` give its numbers. Other adapters are refused, with a way out."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from builder.importing.adapter_import import ImportOptions, import_tenant
from builder.importing.adapters import read_folder
from builder.importing.folders import Importer
from builder.importing.options import Matching
from builder.store.store import Store, TenantVersion
from builder.training.model import TenantModel
from hplm.adapters.groups import Tiles
from hplm.errors import InvalidInput
from hplm.model import stacks
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import load_checkpoint, split
from hplm.model.layer import Layers
from tests.builder.checkpoints import SIZES, save_base, save_tokenizer
from tests.builder.importing.stores import FIXTURES, LABELS, changed, make_imported_store, put, put_tensors, texts
from tests.builder.stores import build
from tests.support.device import DEVICE
from tests.support.families import SENTENCES, save_family
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

UPPER_ONLY = sorted(path.name for path in FIXTURES.iterdir() if not path.name.endswith("-lower"))
NAMED = ImportOptions(labels=LABELS)
CONFIG, MODEL = "adapter_config.json", "config.json"  # of the adapter, the whole model
WEIGHTS, CLASSIFIER = "adapter_model.safetensors", "base_model.model.classifier"
NAMELESS = {"task_type": None, "auto_mapping": None}


def expected(name: str) -> dict[str, torch.Tensor]:
    stored = json.loads((FIXTURES / name / "expected.json").read_text())
    return {part: torch.tensor(numbers) for part, numbers in stored.items()}


def through(layers: Layers, x: torch.Tensor, store: Store, model: TenantModel | None = None) -> torch.Tensor:
    """Returns the hidden states of one sequence after these layers, with the adapter of a tenant."""
    one = Tiles(np.array([0]), np.array([len(x)]), DEVICE)
    return stacks.through(layers, x, PackedAttention([len(x)], store.config.heads), model and model.adapts(one, one))


def check_upper_half(store: Store, tenant: TenantVersion, name: str) -> None:
    """Computes last hidden states and logits from the library's states at the split, by what was stored in 16 bits."""
    wanted, layers = expected(name), store.upper().layers
    found = store.knowledge(tenant)
    model = TenantModel.of(found.adapter, found.head)
    with torch.no_grad():
        end, bare = through(layers, wanted["split"], store, model), through(layers, wanted["split"], store)
        logits = model.read(end if tenant.task == "tag" else end[:1])
    assert (end - wanted["end"]).abs().max() < 5e-3 and (bare - wanted["end"]).abs().max() > 0.05
    assert logits.shape == wanted["logits"].shape and (logits - wanted["logits"]).abs().max() < 5e-3


@pytest.mark.parametrize("name", UPPER_ONLY)
def test_the_upper_half_equals_the_librarys(store, name):
    tenant, report = import_tenant(store, "acme", FIXTURES / name, NAMED, DEVICE)
    assert tenant == store.tenants()[0] and (tenant.labels, tenant.version) == (LABELS, 1)
    assert report["imported"]["trained_on"] == "tiny-bert" and store.report(tenant) == report
    check_upper_half(store, tenant, name)


MODULES = {  # of upper layers, by family: those that peft changes, and those of the head that it saves whole
    "bert": ("attention.self.query", "intermediate.dense", "output.dense"),
    "eurobert": ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "modernbert": ("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo"),
    "roberta": ("attention.self.query", "attention.self.value"),
}


@pytest.mark.parametrize("task_type, ending", [("SEQ_CLS", "SequenceClassification"), ("TOKEN_CLS", "TokenClassification")])
@pytest.mark.parametrize("family", MODULES)
@torch.no_grad()
def test_a_lora_of_each_family_gives_the_numbers_of_the_merged_model(tmp_path, family, task_type, ending):
    stock, lower, rank, alpha = save_family(tmp_path / "base", family, f"For{ending}", num_labels=3), 1, 2, 6
    base = load_checkpoint(str(tmp_path / "base"), "tiny", lower)
    store = Store.create(tmp_path / "store", str(tmp_path / "base"), base.config, base.tokenizer_json, *split(base))
    build(store, tmp_path, "root", [*SENTENCES] * 5)
    tensors = {name: tensor for name, tensor in stock.state_dict().items() if "classifier" in name}
    for name, module in stock.named_modules():
        number = next((int(part) for part in name.split(".") if part.isdigit()), -1)
        if number >= lower and name.endswith(MODULES[family]):
            a, b = torch.randn(rank, module.in_features) / 4, torch.randn(module.out_features, rank) / 4
            module.weight += alpha / rank * b @ a
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    assert len(tensors) > 8
    folder = tmp_path / "adapter"
    folder.mkdir()
    put(folder / CONFIG, peft_type="LORA", task_type=task_type, r=rank, lora_alpha=alpha, base_model_name_or_path="base")
    save_file({f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    if task_type == "SEQ_CLS":  # a configuration beside the adapter may say that its classifier reads more
        put(folder / MODEL, classifier_pooling="mean", id2label=dict(enumerate(LABELS)))
        refused(store, folder, NAMED, "classifier_pooling 'mean'", "merge_and_unload")
        (folder / MODEL).unlink()
    tenant, _ = import_tenant(store, "acme", folder, NAMED, DEVICE)
    ids = torch.tensor([[0, 9, 7, 8, 9, 7, 8, 6, 5, 8, 2]])
    expected = stock(ids, output_hidden_states=True)
    found, upper, positions = store.knowledge(tenant), store.upper().to(DEVICE), torch.arange(ids.shape[1])
    model = TenantModel.of(found.adapter, found.head)
    one, x = Tiles(np.array([0]), np.array([len(positions)]), DEVICE), expected.hidden_states[lower][0]
    attend, turn = PackedAttention([len(x)], store.config.heads), stacks.turn_of(store.config, positions, x.dtype)
    end = upper.leave(stacks.through(upper.layers, x, attend, model.adapts(one, one), turn=turn))
    logits = model.read(end if task_type == "TOKEN_CLS" else end[:1])
    wanted = expected.logits.view(-1, 3)
    assert (logits - wanted).abs().max() < 5e-3 * max(1, wanted.abs().max())


ONE = {"id2label": {0: "LABEL_0"}}
MANY = {"problem_type": "multi_label_classification"}
FIRST = {f"{CLASSIFIER}.{part}": lambda own: own[:1] for part in ("weight", "bias")}  # output of the head


@pytest.mark.parametrize(
    "name, changes, given, task",
    [
        ("peft-everywhere", {MODEL: {"id2label": dict(enumerate(LABELS)), **MANY}}, {}, "multilabel"),
        ("peft-pooler", {}, {"task": "multilabel", "labels": LABELS}, "multilabel"),
        ("peft-everywhere", {MODEL: ONE, WEIGHTS: FIRST}, {}, "regress"),
        ("peft-everywhere", {MODEL: {"problem_type": "regression"}, WEIGHTS: FIRST}, {}, "regress"),
        ("peft-everywhere", {WEIGHTS: FIRST, CONFIG: NAMELESS}, {"task": "regress"}, "regress"),
    ],
)
def test_the_task_is_that_of_the_files_or_the_users(store, tmp_path, name, changes, given, task):
    """A single output is a value: both libraries train it so, even if their files do not say it."""
    folder = changed(tmp_path, name)
    for file, change in changes.items():
        (put if file.endswith(".json") else put_tensors)(folder / file, **change)
    tenant, _ = import_tenant(store, "acme", folder, ImportOptions(**given), DEVICE)
    assert (tenant.task, tenant.labels) == (task, ["value"] if task == "regress" else LABELS)


def test_another_import_is_the_next_version_and_keeps_the_labels(store):
    """Clients know logits by the order of labels, so rows of another order are moved."""
    again = ImportOptions(labels=["green", "red", "blue"])
    import_tenant(store, "acme", FIXTURES / "peft-everywhere", NAMED, DEVICE)
    update, _ = import_tenant(store, "acme", FIXTURES / "peft-pooler", again, DEVICE)
    assert (update.version, update.labels) == (2, LABELS)
    head, stored_head = read_folder(FIXTURES / "peft-pooler", store.model, None).head, store.tenant_weights(update)[1]
    for part in ("weight", "bias"):
        assert torch.equal(stored_head[part], head.weights[part].half()[[1, 0, 2]])
    assert torch.equal(stored_head["dense"], head.weights["dense"].half())
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "'a', 'b', 'c'", "--id")):
        import_tenant(store, "acme", FIXTURES / "peft-pooler", ImportOptions(labels=["a", "b", "c"]), DEVICE)
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "classify", "tag", "--id")):
        import_tenant(store, "acme", FIXTURES / "peft-tag-patterns", NAMED, DEVICE)


def refused(store: Store, folder: Path, options: ImportOptions, *named: object) -> None:
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        import_tenant(store, "acme", folder, options, DEVICE)
    assert store.tenants() == [] and store.domains() == [("root", 1)]


LAYER = "bert.encoder.layer.2.attention.self.query"
QUERY = f"base_model.model.{LAYER}.lora"
REFUSED = {  # by fixture and file: what the file gets, and what the message mentions
    ("peft-everywhere", CONFIG): [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' merge_and_unload"),
        ({"bias": "lora_only"}, "bias='lora_only' merge_and_unload"),
        *(({name: True}, name) for name in ("use_dora", "lora_bias", "fan_in_fan_out", "layer_replication")),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' merge_and_unload"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "task_type 'SEQ_2_SEQ_LM' SEQ_CLS TOKEN_CLS"),
        (NAMELESS, "--task classify multilabel regress tag"),
        ({"lora_alpha": None}, f"{CONFIG} lora_alpha"),
        ({"lora_alpha": "16"}, f"{CONFIG} lora_alpha '16'"),
        ({"alpha_pattern": {"query)": 7}}, f"{CONFIG} alpha_pattern 'query)'"),
        ({"alpha_pattern": ["query", 7]}, f"{CONFIG} alpha_pattern"),
        ({"r": 8}, f"{CONFIG} 4 8 'bert.encoder.layer.2.attention.output.dense' rank_pattern"),
        ({"rank_pattern": {"layer.3.attention.self.query": 2}}, f"{CONFIG} 4 2 'bert.encoder.layer.3.attention.self.query'"),
        (b"{}", f"{CONFIG} peft"),
        (b'{"config": {}, "model_type": "bert"}', f"{CONFIG} peft merge"),  # of AdapterHub
        (None, CONFIG),
    ],
    ("peft-everywhere", WEIGHTS): [
        ({f"{QUERY}_B.weight": None}, f"'{LAYER}'"),
        ({f"{QUERY}_A.weight": torch.zeros(4, 48)}, "4 48 'tiny' 32"),
        ({f"{QUERY}_A.weight": torch.zeros(0, 32)}, f"'{LAYER}' 0"),
        ({f"{QUERY}_magnitude_vector": torch.ones(32)}, "lora_magnitude_vector"),
        ({"base_model.model.bert.embeddings.lora_embedding_A": torch.ones(1)}, "lora_embedding_A"),
        ({f"base_model.model.x.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}, "'x'"),
        ({"base_model.model.bert.embeddings.norm": torch.ones(32)}, "embeddings.norm"),
        (dict.fromkeys(FIRST), "modules_to_save"),
        ({f"{CLASSIFIER}.weight": torch.ones(3, 48)}, "weight 3 48"),
        ({f"{CLASSIFIER}.weight": torch.full((3, 32), 1e6)}, "weight fp16"),
        ({f"{CLASSIFIER}.weight": torch.full((3, 32), torch.nan)}, "not finite classifier.weight"),
        (None, "adapter_model.safetensors adapter_model.bin --from"),
    ],
    ("peft-everywhere", MODEL): [
        ({"problem_type": "regression"}, "--labels"),
        ({"problem_type": "ranking"}, "problem_type 'ranking' single_label_classification"),
    ],
}


@pytest.mark.parametrize("name, file, change, named", [(*at, *case) for at, cases in REFUSED.items() for case in cases])
def test_what_would_give_other_numbers_is_refused(store, tmp_path, name, file, change, named):
    """Damaged files: tests/refusals/test_files.py. Those that would run code: test_checkpoint.py."""
    options = ImportOptions() if change is NAMELESS else NAMED
    refused(store, changed(tmp_path, name, file, change), options, *named.split())


@pytest.mark.parametrize(
    "name, file, change, given, named",
    [
        ("peft-everywhere", "", None, {}, "3 --labels"),
        ("peft-everywhere", "", None, {"labels": ["a", "b"]}, "3 2 --labels"),
        ("peft-everywhere", "", None, {"labels": ["a", "b", "a"]}, "'a', 'b', --labels"),
        ("peft-everywhere", CONFIG, NAMELESS, {"task": "span"}, "'span'"),
        ("peft-everywhere", CONFIG, NAMELESS, {"task": "guess"}, "'guess'"),
        ("peft-everywhere", MODEL, MANY, {"task": "classify", "labels": LABELS}, "multilabel classify --task"),
    ],
)
def test_what_the_user_says_must_fit_the_files(store, tmp_path, name, file, change, given, named):
    refused(store, changed(tmp_path, name, file, change), ImportOptions(**given), *named.split())


def test_adapters_of_layers_that_cannot_hold_them_are_refused(store, tmp_path):
    refused(store, FIXTURES / "peft-lower", NAMED, "0, 1", "layers_to_transform", 2, 3, "merge_and_unload")
    short = Store(make_imported_store(tmp_path / "short", lower=2, upper=1))
    refused(short, FIXTURES / "peft-everywhere", NAMED, 3, "'tiny'", 2, 1)


def test_a_missing_pooler_is_refused(tmp_path):
    folder, base = make_imported_store(tmp_path), tmp_path / "base"
    put_tensors(base / "model.safetensors", **{f"pooler.dense.{part}": None for part in ("weight", "bias")})
    refused(Store(folder), FIXTURES / "peft-everywhere", NAMED, "pooler", base)
    import_tenant(Store(folder), "own", FIXTURES / "peft-pooler", NAMED, DEVICE)  # has a pooler of its own
    shutil.rmtree(base)
    with pytest.raises(InvalidInput, match=mentioning(base)):
        import_tenant(Store(folder), "acme", FIXTURES / "peft-everywhere", NAMED, DEVICE)
    save_base(base)
    import_tenant(Store(folder), "acme", FIXTURES / "peft-everywhere", NAMED, DEVICE)


def merged(folder: Path, is_dora: bool) -> Path:
    """Saves the BERT of `peft-lower` as peft's merge_and_unload() leaves it, with changes in all layers."""
    adapter = load_file(FIXTURES / "peft-lower" / WEIGHTS)
    save_base(folder)
    model = transformers.BertForSequenceClassification.from_pretrained(folder, id2label=dict(enumerate(LABELS)))
    with torch.no_grad():
        for name, own in adapter.items():
            module = model.get_submodule(
                name.removeprefix("base_model.model.").partition(".lora")[0].removesuffix(".weight").removesuffix(".bias")
            )
            if name.endswith("lora_A.weight"):
                change = 1.5 * adapter[name.replace("lora_A", "lora_B")] @ own  # lora_alpha 3, r 2
                weight = module.weight + change
                size = module.weight.norm(dim=1, keepdim=True)  # DoRA's magnitude: here that of the base, a little larger
                module.weight.copy_(1.05 * size * weight / weight.norm(dim=1, keepdim=True) if is_dora else weight)
            elif ".lora_" not in name:
                getattr(module, name.rpartition(".")[2]).copy_(own)
    model.save_pretrained(folder)
    save_tokenizer(folder, SIZES["vocab_size"])
    return folder


@pytest.mark.parametrize("is_dora", [False, True], ids=["LoRA of all layers", "DoRA"])
def test_adapters_of_other_kinds_are_matched_once_they_are_merged(store, tmp_path, is_dora):
    """The answers to texts that it has not learned are the merged model's, as many as `--least` asks for by default."""
    importer = Importer(store, ImportOptions(), Matching(), texts(tmp_path, 600), DEVICE)
    _, report = importer.one("acme", merged(tmp_path / "merged", is_dora))
    assert report["after"]["agreement"] >= Matching.least
