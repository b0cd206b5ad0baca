"""Adapters that cannot be imported exactly are refused by name, with a way out, and do not change the store."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from builder.importing.lower import NewDomain
from builder.importing.tenant import ImportOptions, import_tenant
from builder.store.store import Store
from builder.tables.domain import DomainOptions
from hplm.errors import InvalidInput
from tests.builder.checkpoints import save_base
from tests.builder.importing.stores import FIXTURES, LABELS, changed, make_imported_store
from tests.builder.stores import SMALL, corpus
from tests.support.device import DEVICE
from tests.support.message import mentioning

PLAIN, NAMED = ImportOptions(), ImportOptions(labels=LABELS)
CONFIG, HEAD, MODEL = "adapter_config.json", "head_config.json", "config.json"  # of the adapter, its head, the whole model


@pytest.fixture
def store(imported) -> Store:
    """No copy, because refusals change nothing."""
    return Store(imported)


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
        ("activation_function", None, "activation_function layers=1"),
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
    short = Store(make_imported_store(tmp_path, lower=2, upper=1))
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
