"""Imported adapters of `peft` and `adapters` give the numbers of their libraries. Others are refused, with a way out."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.importing.adapters import read_folder
from builder.importing.tenant import ImportOptions, NewDomain, import_tenant, merge
from builder.store.store import Store, TenantFile
from builder.tables.domain import DomainOptions
from builder.training.model import TenantModel
from hplm.adapters.groups import Tiles
from hplm.errors import InvalidInput
from hplm.model import stacks
from hplm.model.attention import PackedAttention
from hplm.model.layer import Layers
from tests.builder.checkpoints import save_base
from tests.builder.importing.stores import FIXTURES, LABELS, changed, make_imported_store, put, put_tensors
from tests.builder.stores import SMALL, corpus
from tests.support.device import DEVICE
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

UPPER_ONLY = sorted(path.name for path in FIXTURES.iterdir() if not path.name.endswith("-lower"))
PLAIN, NAMED = ImportOptions(), ImportOptions(labels=LABELS)
CONFIG, HEAD, MODEL = "adapter_config.json", "head_config.json", "config.json"  # of the adapter, its head, the whole model
WEIGHTS, CLASSIFIER = "adapter_model.safetensors", "base_model.model.classifier"
NAMELESS = {"task_type": None, "auto_mapping": None}


def expected(name: str) -> dict[str, torch.Tensor]:
    stored = json.loads((FIXTURES / name / "expected.json").read_text())
    return {part: torch.tensor(numbers) for part, numbers in stored.items()}


def through(layers: Layers, x: torch.Tensor, store: Store, model: TenantModel | None = None) -> torch.Tensor:
    """Returns the hidden states of one sequence after these layers, with the adapter of a tenant."""
    one = Tiles(np.array([0]), np.array([len(x)]), DEVICE)
    return stacks.through(layers, x, PackedAttention([len(x)], store.config.heads), model and model.adapts(one, one))


def check_upper_half(store: Store, tenant: TenantFile, name: str) -> None:
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
    options = NAMED if name.startswith("peft") else PLAIN
    tenant, report = import_tenant(store, "acme", FIXTURES / name, options, DEVICE)
    assert tenant == store.tenants()[0] and (tenant.labels, tenant.version) == (LABELS, 1)
    assert report["imported"]["trained_on"] == "tiny-bert" and store.report(tenant) == report
    check_upper_half(store, tenant, name)


ONE = {"id2label": {0: "LABEL_0"}}
MANY = {"problem_type": "multi_label_classification"}
FIRST, HUB_FIRST = (  # the first output of a head
    {f"{head}.{part}": lambda own: own[:1] for part in ("weight", "bias")} for head in (CLASSIFIER, "heads.acme.4")
)


@pytest.mark.parametrize(
    "name, changes, given, task",
    [
        ("peft-everywhere", {MODEL: {"id2label": dict(enumerate(LABELS)), **MANY}}, {}, "multilabel"),
        ("adapters-stock-head", {MODEL: MANY}, {}, "multilabel"),
        ("adapters-double", {HEAD: {"head_type": "multilabel_classification"}}, {}, "multilabel"),
        ("peft-pooler", {}, {"task": "multilabel", "labels": LABELS}, "multilabel"),
        ("peft-everywhere", {MODEL: ONE, WEIGHTS: FIRST}, {}, "regress"),
        ("peft-everywhere", {MODEL: {"problem_type": "regression"}, WEIGHTS: FIRST}, {}, "regress"),
        ("peft-everywhere", {WEIGHTS: FIRST, CONFIG: NAMELESS}, {"task": "regress"}, "regress"),
        ("adapters-double", {"pytorch_model_head.bin": HUB_FIRST}, {}, "regress"),
        ("adapters-double", {HEAD: {"label2id": {"red": 0, "blue": 3}}}, {"labels": LABELS}, "classify"),
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
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "['a', 'b', 'c']", "--id")):
        import_tenant(store, "acme", FIXTURES / "peft-pooler", ImportOptions(labels=["a", "b", "c"]), DEVICE)
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "classify", "tag", "--id")):
        import_tenant(store, "acme", FIXTURES / "adapters-lora-tag", ImportOptions(), DEVICE)


def test_a_lower_part_becomes_a_domain(store, tmp_path):
    new = NewDomain("acme-lower", [corpus(tmp_path, 1)], SMALL)
    options = ImportOptions(labels=LABELS, new_domain=new)
    tenant, report = import_tenant(store, "acme", FIXTURES / "peft-lower", options, DEVICE)
    assert (tenant.domain, tenant.domain_version, tenant.rank) == ("acme-lower", 1, 2)
    check_upper_half(store, tenant, "peft-lower")
    table = store.table("acme-lower", 1)
    assert table.meta.parent_branch == ("root", 1)
    megabytes = sum(file.stat().st_size for file in table.folder.iterdir()) / 1e6
    assert report["merged"].pop("mb") == pytest.approx(megabytes, rel=0.05)
    assert report["merged"] == {"domain": "acme-lower", "layers": [0, 1], "ngrams": table.meta.keys}
    window = torch.tensor(table.space.unpack(table.index.by_row()[:50]).astype(np.int64))
    rows, library = torch.stack([table.rows.vectors(i + 1) for i in range(50)]), expected("peft-lower")
    merge(merged := store.lower("root", 1), read_folder(FIXTURES / "peft-lower", store.model, None).halves(store.config)[0])
    with torch.no_grad():
        for lower in (merged, store.lower("root", 1)):
            assert ((rows - lower(window)).abs().max() < 0.01) == (lower is merged)
            found = through(lower.layers, library["start"], store)
            assert ((found - library["split"]).abs().max() < 1e-4) == (lower is merged)
    assert import_tenant(store, "acme", FIXTURES / "peft-lower", options, DEVICE) == (tenant, store.report(tenant))
    with pytest.raises(InvalidInput, match=mentioning("acme-lower", "acme", "--as-domain")):
        import_tenant(store, "acme", FIXTURES / "peft-lower", replace(options, labels=options.labels[::-1]), DEVICE)
    with pytest.raises(InvalidInput, match=mentioning("'acme-lower'", store.folder, "--as-domain")):
        other = replace(options, new_domain=replace(new, corpus=[corpus(tmp_path, 2)]))
        import_tenant(store, "acme", FIXTURES / "peft-lower", other, DEVICE)


def refused(store: Store, folder: Path, options: ImportOptions, *named: object) -> None:
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        import_tenant(store, "acme", folder, options, DEVICE)
    assert store.tenants() == [] and store.domains() == [("root", 1)]


LAYER = "bert.encoder.layer.2.attention.self.query"
QUERY = f"base_model.model.{LAYER}.lora"
REFUSED = {  # by fixture and file: what the file gets, and what the message mentions
    ("peft-everywhere", CONFIG): [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' LoraConfig"),
        ({"bias": "lora_only"}, "bias='lora_only' bias='none'"),
        *(({name: True}, name) for name in ("use_dora", "lora_bias", "fan_in_fan_out", "layer_replication")),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' init_lora_weights=True"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "task_type 'SEQ_2_SEQ_LM' SEQ_CLS TOKEN_CLS"),
        (NAMELESS, "--task classify multilabel regress tag"),
        ({"lora_alpha": None}, f"{CONFIG} lora_alpha"),
        ({"lora_alpha": "16"}, f"{CONFIG} lora_alpha '16'"),
        ({"alpha_pattern": {"query)": 7}}, f"{CONFIG} alpha_pattern 'query)'"),
        ({"alpha_pattern": ["query", 7]}, f"{CONFIG} alpha_pattern"),
        ({"r": 8}, f"{CONFIG} 4 8 'bert.encoder.layer.2.attention.output.dense' rank_pattern"),
        ({"rank_pattern": {"layer.3.attention.self.query": 2}}, f"{CONFIG} 4 2 'bert.encoder.layer.3.attention.self.query'"),
        (b"{}", f"{CONFIG} peft adapters"),
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
    ("adapters-double", CONFIG): [
        ({"original_ln_before": True}, "original_ln_before=True double_seq_bn"),
        ({"original_ln_after": False}, "original_ln_after=False"),
        *(({name: True}, f"{name}=True") for name in ("ln_before", "ln_after", "is_parallel", "use_gating", "phm_layer")),
        *(({name: True}, f"{name}=True") for name in ("inv_adapter", "cross_adapter")),
        ({"non_linearity": "leakyrelu"}, "non_linearity 'leakyrelu' gelu"),
        ({"non_linearity": None}, f"{CONFIG} non_linearity"),
        ({"architecture": "union"}, "architecture 'union' double_seq_bn"),
    ],
    ("adapters-stock-head", CONFIG): [({"scaling": "learned"}, "'learned'")],
    ("adapters-lora-tag", CONFIG): [
        ({"composition_mode": "scale"}, "composition_mode='scale' LoRAConfig"),
        *(({name: True}, f"{name}=True LoRAConfig") for name in ("use_gating", "use_dora", "vera_d")),
        ({"r": "eight"}, f"{CONFIG} r 'eight'"),
        ({"r": 0}, f"{CONFIG} r 0"),
        ({"r": 8}, f"{CONFIG} 4 r 8"),
    ],
    ("peft-everywhere", MODEL): [
        ({"problem_type": "regression"}, "--labels"),
        ({"problem_type": "ranking"}, "problem_type 'ranking' single_label_classification"),
    ],
    ("adapters-stock-head", MODEL): [({"problem_type": "regression"}, "3")],
    ("adapters-stock-head", HEAD): [
        (b"{}", "model_class BertForTokenClassification"),
        ({"config": {"head_type": "causal_lm"}}, "head_type 'causal_lm' multilabel_classification"),
        ({"config": {"head_type": "tagging"}}, "layer, classifier.bias"),
    ],
    ("adapters-double", HEAD): [
        ({"head_type": "multiple_choice"}, "head_type 'multiple_choice'"),
        (b'{"config": {}}', "head_type multilabel_classification"),
        ({"use_pooler": True}, "use_pooler=True 3"),
        ({"activation_function": None}, "no activation_function: gelu"),
        ({"label2id": {"red": 0, "green": 1, "blue": 3}}, "3 --labels"),
        ({"label2id": None}, "3 --labels"),
        ({"label2id": {"red": 0, "green": 1}}, "3 2 --labels"),
        (None, "with_head=True"),
    ],
}


@pytest.mark.parametrize("name, file, change, named", [(*at, *case) for at, cases in REFUSED.items() for case in cases])
def test_what_would_give_other_numbers_is_refused(store, tmp_path, name, file, change, named):
    """Damaged files: tests/refusals/test_files.py. Those that would run code: test_checkpoint.py."""
    is_nameless = name.startswith("peft") and change is not NAMELESS
    refused(store, changed(tmp_path, name, file, change), NAMED if is_nameless else PLAIN, *named.split())


@pytest.mark.parametrize(
    "name, file, change, given, named",
    [
        ("peft-everywhere", "", None, {}, "3 --labels"),
        ("peft-everywhere", "", None, {"labels": ["a", "b"]}, "3 2 --labels"),
        ("peft-everywhere", "", None, {"labels": ["a", "b", "a"]}, "'a', 'b', --labels"),
        ("adapters-lora-tag", "", None, {"task": "classify"}, "tag classify --task"),
        ("peft-everywhere", CONFIG, NAMELESS, {"task": "span"}, "'span'"),
        ("peft-everywhere", CONFIG, NAMELESS, {"task": "guess"}, "'guess'"),
        ("peft-everywhere", MODEL, MANY, {"task": "classify", "labels": LABELS}, "multilabel classify --task"),
        ("adapters-stock-head", MODEL, MANY, {"task": "classify", "labels": LABELS}, "multilabel classify --task"),
    ],
)
def test_what_the_user_says_must_fit_the_files(store, tmp_path, name, file, change, given, named):
    refused(store, changed(tmp_path, name, file, change), ImportOptions(**given), *named.split())


def test_adapters_of_layers_that_cannot_hold_them_are_refused(store, tmp_path):
    refused(store, FIXTURES / "peft-lower", NAMED, "0, 1", "layers_to_transform", 2, 3, "--as-domain")
    new = NewDomain("low", [corpus(tmp_path, 1)], SMALL)
    tensors = torch.load((bottleneck := changed(tmp_path, "adapters-double")) / "pytorch_adapter.bin")
    lower = {name.replace("layer.2", "layer.0").replace("layer.3", "layer.1"): tensor for name, tensor in tensors.items()}
    torch.save(lower, bottleneck / "pytorch_adapter.bin")
    refused(store, bottleneck, ImportOptions(new_domain=new), "bottleneck", "0, 1", "leave_out", 2, 3)
    refused(store, FIXTURES / "peft-everywhere", ImportOptions(labels=LABELS, new_domain=new), "--as-domain")
    few = ImportOptions(labels=LABELS, new_domain=NewDomain("low", [corpus(tmp_path, 1)], DomainOptions()))
    refused(store, FIXTURES / "peft-lower", few, "50,000", "--min-tokens")
    assert not store.work_folder("low", 1).exists()
    short = Store(make_imported_store(tmp_path / "short", lower=2, upper=1))
    refused(short, FIXTURES / "peft-everywhere", NAMED, 3, "'tiny'", 2, 1)


def test_a_missing_pooler_is_refused(tmp_path):
    folder, base = make_imported_store(tmp_path), tmp_path / "base"
    put_tensors(base / "model.safetensors", **{f"pooler.dense.{part}": None for part in ("weight", "bias")})
    refused(Store(folder), FIXTURES / "peft-everywhere", NAMED, "pooler", base)
    import_tenant(Store(folder), "own", FIXTURES / "peft-pooler", NAMED, DEVICE)  # has a pooler of its own
    shutil.rmtree(base)
    with pytest.raises(InvalidInput, match=mentioning("pooler", base)):
        import_tenant(Store(folder), "acme", FIXTURES / "peft-everywhere", NAMED, DEVICE)
    save_base(base)
    import_tenant(Store(folder), "acme", FIXTURES / "peft-everywhere", NAMED, DEVICE)
