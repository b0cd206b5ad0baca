"""Imported adapters of `peft` and `adapters` give the numbers of their libraries. Others are refused, with a way out."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from builder.importing.adapters import read_folder
from builder.importing.tenant import ImportOptions, NewDomain, import_tenant, merge
from builder.store.store import Store, TenantFile
from builder.tables.domain import DomainOptions
from builder.training.model import TenantModel
from hplm.adapters.tiles import Tiles
from hplm.errors import InvalidInput
from hplm.model import stacks
from hplm.model.attention import PackedAttention
from hplm.model.layer import Layers
from tests.builder.checkpoints import save_base
from tests.builder.importing.stores import FIXTURES, LABELS, changed, make_imported_store, put
from tests.builder.stores import SMALL, corpus
from tests.support.device import DEVICE
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

UPPER_ONLY = sorted(path.name for path in FIXTURES.iterdir() if not path.name.endswith(("-lower", "-refused")))
PLAIN, NAMED = ImportOptions(), ImportOptions(labels=LABELS)
CONFIG, HEAD, MODEL = "adapter_config.json", "head_config.json", "config.json"  # of the adapter, its head, the whole model


def expected(name: str) -> dict[str, torch.Tensor]:
    stored = json.loads((FIXTURES / name / "expected.json").read_text())
    return {part: torch.tensor(numbers) for part, numbers in stored.items()}


def through(layers: Layers, x: torch.Tensor, store: Store, model: TenantModel | None = None) -> torch.Tensor:
    """Returns the hidden states of one sequence after these layers, with the adapter of a tenant."""
    one = Tiles(np.zeros(len(x), dtype=np.int64), DEVICE)
    return stacks.through(layers, x, PackedAttention([len(x)], store.config.heads), model and model.adapts(one, one))


def check_upper_half(store: Store, tenant: TenantFile, name: str) -> None:
    """Computes last hidden states and logits from the library's states at the split, by what was stored in 16 bits."""
    wanted, layers = expected(name), store.upper().layers
    layouts = tenant.adapter_layout(store.config), tenant.head_layout(store.config)
    model = TenantModel.of(*layouts, *store.tenant_weights(tenant))
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


def test_labels_that_may_all_hold_are_multilabel(store, tmp_path):
    """Whether the model's configuration, AdapterHub's head or the user says so."""
    problem = {"problem_type": "multi_label_classification"}
    for tenant_id, folder in (
        ("peft", changed(tmp_path, "peft-everywhere", "config.json", id2label=dict(enumerate(LABELS)), **problem)),
        ("stock", changed(tmp_path, "adapters-stock-head", "config.json", **problem)),
        ("own", changed(tmp_path, "adapters-double", "head_config.json", head_type="multilabel_classification")),
        ("told", FIXTURES / "peft-pooler"),
    ):
        options = ImportOptions(**({"task": "multilabel", "labels": LABELS} if tenant_id == "told" else {}))
        tenant, _ = import_tenant(store, tenant_id, folder, options, DEVICE)
        assert (tenant.task, tenant.labels) == ("multilabel", LABELS), tenant_id


def cut_to_one(path: Path, names: str) -> None:
    """Leaves the first row of a head's weights."""
    is_safe = path.suffix == ".safetensors"
    tensors = load_file(path) if is_safe else torch.load(path)
    tensors |= {names + part: tensors[names + part][:1].clone() for part in ("weight", "bias")}
    (save_file if is_safe else torch.save)(tensors, path)


@pytest.mark.parametrize("config", [{"problem_type": "regression"}, {}])
def test_a_single_output_is_a_value(store, tmp_path, config):
    """Both libraries train it so, even if their files do not say it. Without a task the user must."""
    peft = changed(tmp_path, "peft-everywhere", "config.json", id2label={0: "LABEL_0"}, **config)
    hub = changed(tmp_path, "adapters-double")
    cut_to_one(peft / "adapter_model.safetensors", "base_model.model.classifier.")
    cut_to_one(hub / "pytorch_model_head.bin", "heads.acme.4.")
    for tenant_id, folder in (("peft", peft), ("hub", hub)):
        tenant, _ = import_tenant(store, tenant_id, folder, ImportOptions(), DEVICE)
        assert (tenant.task, tenant.labels) == ("regress", ["value"])
    put(peft / "adapter_config.json", task_type=None, auto_mapping=None)
    if not config:
        with pytest.raises(InvalidInput, match=mentioning("--task", "classify", "multilabel", "regress", "tag")):
            import_tenant(store, "acme", peft, ImportOptions(), DEVICE)
    tenant, _ = import_tenant(store, "acme", peft, ImportOptions(task="regress"), DEVICE)
    assert (tenant.task, tenant.labels) == ("regress", ["value"])


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
    with pytest.raises(InvalidInput, match=mentioning("'acme-lower'", store.folder, "--as-domain")):
        import_tenant(store, "acme", FIXTURES / "peft-lower", options, DEVICE)


def refused(store: Store, folder: Path, options: ImportOptions, *named: object) -> None:
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        import_tenant(store, "acme", folder, options, DEVICE)
    assert store.tenants() == [] and store.domains() == [("root", 1)]


OPTIONS = {  # by fixture and file: an option, a value that cannot be imported, and what the message names
    ("peft-everywhere", CONFIG): [
        ("peft_type", "LOHA", "peft_type 'LOHA' LoraConfig"),
        ("bias", "lora_only", "bias='lora_only' bias='none'"),
        *((name, True, name) for name in ("use_dora", "lora_bias", "fan_in_fan_out", "layer_replication")),
        ("trainable_token_indices", [7], "trainable_token_indices"),
        ("init_lora_weights", "pissa", "init_lora_weights='pissa' init_lora_weights=True"),
        ("task_type", "SEQ_2_SEQ_LM", "task_type 'SEQ_2_SEQ_LM' SEQ_CLS TOKEN_CLS"),
        ("lora_alpha", None, f"{CONFIG} lora_alpha"),
        ("lora_alpha", "16", f"{CONFIG} lora_alpha '16'"),
        ("alpha_pattern", {"query)": 7}, f"{CONFIG} alpha_pattern 'query)'"),
        ("alpha_pattern", ["query", 7], f"{CONFIG} alpha_pattern"),
        ("r", 8, f"{CONFIG} 4 8 'bert.encoder.layer.2.attention.output.dense' rank_pattern"),
        ("rank_pattern", {"layer.3.attention.self.query": 2}, f"{CONFIG} 4 2 'bert.encoder.layer.3.attention.self.query'"),
    ],
    ("adapters-double", CONFIG): [
        ("original_ln_before", True, "original_ln_before=True double_seq_bn"),
        ("original_ln_after", False, "original_ln_after=False"),
        *((name, True, f"{name}=True") for name in ("ln_before", "ln_after", "is_parallel", "use_gating", "phm_layer")),
        *((name, True, f"{name}=True") for name in ("cross_adapter", "inv_adapter")),
        ("non_linearity", "leakyrelu", "non_linearity 'leakyrelu' gelu"),
        ("non_linearity", None, f"{CONFIG} non_linearity"),
        ("architecture", "union", "architecture 'union' double_seq_bn"),
    ],
    ("adapters-stock-head", CONFIG): [("scaling", "learned", "'learned'")],
    ("adapters-lora-tag", CONFIG): [
        ("composition_mode", "scale", "composition_mode='scale' LoRAConfig"),
        *((name, True, f"{name}=True LoRAConfig") for name in ("use_gating", "use_dora", "vera_d")),
        ("r", "eight", f"{CONFIG} r 'eight'"),
        ("r", 0, f"{CONFIG} r 0"),
        ("r", 8, f"{CONFIG} 4 r 8"),
    ],
    ("peft-everywhere", MODEL): [
        ("problem_type", "regression", "--labels"),
        ("problem_type", "ranking", "problem_type 'ranking' single_label_classification"),
    ],
    ("adapters-stock-head", MODEL): [
        ("problem_type", "regression", "3"),
        ("problem_type", "ranking", "problem_type 'ranking' single_label_classification"),
    ],
    ("adapters-double", HEAD): [
        ("head_type", "multiple_choice", "head_type 'multiple_choice'"),
        ("use_pooler", True, "use_pooler=True 3"),
        ("activation_function", None, "activation_function"),
        ("activation_function", "mish", "activation_function 'mish'"),
        ("label2id", {"red": 0, "green": 1, "blue": 3}, "label2id --labels"),
        ("label2id", None, "3 --labels"),
        ("label2id", {"red": 0, "green": 1}, "3 2 --labels"),
    ],
}


@pytest.mark.parametrize(
    "name, file, option, value, named", [(*saved, *case) for saved, cases in OPTIONS.items() for case in cases]
)
def test_options_that_change_the_numbers_are_refused(store, tmp_path, name, file, option, value, named):
    options = NAMED if name.startswith("peft") else PLAIN
    refused(store, changed(tmp_path, name, file, **{option: value}), options, *named.split())


def test_wrong_labels_tasks_and_folders_are_refused(store, tmp_path):
    saved, silent = FIXTURES / "peft-everywhere", changed(tmp_path, "peft-everywhere", CONFIG, task_type=None)
    refused(store, FIXTURES / "adapters-refused", PLAIN, "original_ln_before=True")
    refused(store, saved, PLAIN, 3, "--labels")
    refused(store, saved, ImportOptions(labels=["a", "b"]), 3, 2, "--labels")
    refused(store, saved, ImportOptions(labels=["a", "b", "a"]), "['a', 'b', 'a']", "--labels")
    refused(store, FIXTURES / "adapters-lora-tag", ImportOptions(task="classify"), "tag", "classify", "--task")
    refused(store, silent, ImportOptions(task="span"), "'span'")
    refused(store, silent, ImportOptions(task="guess"), "'guess'")
    for name in ("peft-everywhere", "adapters-stock-head"):
        several = changed(tmp_path / "several", name, MODEL, problem_type="multi_label_classification")
        refused(store, several, ImportOptions(task="classify", labels=LABELS), "multilabel", "classify", "--task")
    refused(store, file := saved / "adapter_model.safetensors", NAMED, file / CONFIG, "--from")


def test_adapters_of_layers_that_cannot_hold_them_are_refused(store, tmp_path):
    refused(store, FIXTURES / "peft-lower", NAMED, "0, 1", "layers_to_transform", 2, 3, "--as-domain")
    new = NewDomain("low", [corpus(tmp_path, 1)], SMALL)
    refused(store, FIXTURES / "adapters-lower", ImportOptions(new_domain=new), "bottleneck", "0, 1", "leave_out", 2, 3)
    refused(store, FIXTURES / "peft-everywhere", ImportOptions(labels=LABELS, new_domain=new), "--as-domain")
    few = ImportOptions(labels=LABELS, new_domain=NewDomain("low", [corpus(tmp_path, 1)], DomainOptions()))
    refused(store, FIXTURES / "peft-lower", few, "50,000", "--min-tokens")
    assert not store.work_folder("low", 1).exists()
    short = Store(make_imported_store(tmp_path / "short", lower=2, upper=1))
    refused(short, FIXTURES / "peft-everywhere", NAMED, 3, "'tiny'", 2, 1)


LAYER = "bert.encoder.layer.2.attention.self.query"
TENSORS = [  # tensors of other values, or none; and what the message names
    ({f"{LAYER}.lora_B.weight": None}, [f"'{LAYER}'"]),
    ({f"{LAYER}.lora_A.weight": torch.zeros(4, 48)}, ["(4, 48)", "'tiny'", "(4, 32)"]),
    ({f"{LAYER}.lora_A.weight": torch.zeros(0, 32)}, [f"'{LAYER}'", 0]),
    ({f"{LAYER}.lora_magnitude_vector": torch.ones(32)}, ["lora_magnitude_vector"]),
    ({"bert.embeddings.lora_embedding_A": torch.ones(1)}, ["lora_embedding_A"]),
    ({f"x.lora_{i}.weight": torch.ones(1, 1) for i in "AB"}, ["'x'"]),
    ({"bert.embeddings.norm": torch.ones(32)}, ["embeddings.norm"]),
    ({"classifier.weight": None, "classifier.bias": None}, ["modules_to_save"]),
    ({"classifier.weight": torch.ones(3, 48)}, ["weight", "(3, 48)"]),
    ({"classifier.weight": torch.full((3, 32), 1e6)}, ["weight", "fp16"]),
    ({"classifier.weight": torch.full((3, 32), torch.nan)}, ["not finite", "classifier.weight"]),
]


@pytest.mark.parametrize("changes, named", TENSORS, ids=range(len(TENSORS)))
def test_unexpected_tensors_are_refused(store, tmp_path, changes, named):
    file = changed(tmp_path, "peft-everywhere") / "adapter_model.safetensors"
    tensors = load_file(file) | {f"base_model.model.{name}": tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    refused(store, file.parent, NAMED, *named)


def test_missing_files_are_refused(store, tmp_path):
    """Damaged ones: tests/refusals/test_files.py. Those that would run code: test_checkpoint.py."""
    refused(store, tmp_path, NAMED, tmp_path / CONFIG)
    folder = changed(tmp_path, "peft-everywhere")
    (folder / "adapter_model.safetensors").unlink()
    refused(store, folder, NAMED, folder, "adapter_model.safetensors", "adapter_model.bin", "--from")
    (folder / CONFIG).write_text("{}")
    refused(store, folder, NAMED, folder / CONFIG, "peft", "adapters")
    (headless := changed(tmp_path, "adapters-double") / HEAD).unlink()
    refused(store, headless.parent, PLAIN, headless.parent, "with_head=True")


def test_a_missing_pooler_is_refused(tmp_path):
    folder, base = make_imported_store(tmp_path), tmp_path / "base"
    tensors = {name: tensor for name, tensor in load_file(base / "model.safetensors").items() if "pooler" not in name}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    refused(Store(folder), FIXTURES / "peft-everywhere", NAMED, "pooler", base)
    import_tenant(Store(folder), "own", FIXTURES / "peft-pooler", NAMED, DEVICE)  # has a pooler of its own
    shutil.rmtree(base)
    with pytest.raises(InvalidInput, match=mentioning("pooler", base)):
        import_tenant(Store(folder), "acme", FIXTURES / "peft-everywhere", NAMED, DEVICE)
    save_base(base)
    import_tenant(Store(folder), "acme", FIXTURES / "peft-everywhere", NAMED, DEVICE)
