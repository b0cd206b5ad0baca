"""Adapters that cannot be imported exactly are refused by name, with a way out, and do not change the store."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from builder.importing.lower import NewDomain
from builder.importing.tenant import ImportOptions, import_tenant
from builder.store.store import Store
from hplm.errors import InvalidInput
from tests.builder.importing.base import save_base
from tests.builder.importing.stores import FIXTURES, LABELS, make_imported_store
from tests.builder.tables.branches import CPU
from tests.builder.tables.test_domain import corpus
from tests.support.message import mentioning

NAMED = ImportOptions(labels=LABELS)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    """One store for all tests, because refusals change nothing."""
    return Store(make_imported_store(tmp_path_factory.mktemp("imported")))


def refused(store: Store, folder: Path, options: ImportOptions, *named: object) -> None:
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        import_tenant(store, "acme", folder, options, CPU, show_progress=False)
    assert store.tenants() == [] and store.domains() == [("root", 1)]


def copied(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(FIXTURES / name, folder / name))


def changed(folder: Path, name: str, file: str, *path: str, value: object) -> Path:
    """Returns a copy of a fixture with one option changed."""
    copy = copied(folder, name) / file
    stored = inner = json.loads(copy.read_text())
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    copy.write_text(json.dumps(stored))
    return copy.parent


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("peft_type", "LOHA", ["peft_type", "'LOHA'", "LoraConfig"]),
        ("bias", "lora_only", ["bias='lora_only'", "bias='none'"]),
        ("use_dora", True, ["use_dora"]),
        ("lora_bias", True, ["lora_bias"]),
        ("fan_in_fan_out", True, ["fan_in_fan_out"]),
        ("layer_replication", [[0, 4]], ["layer_replication"]),
        ("trainable_token_indices", [7], ["trainable_token_indices"]),
        ("init_lora_weights", "pissa", ["init_lora_weights='pissa'", "init_lora_weights=True"]),
        ("task_type", "SEQ_2_SEQ_LM", ["task_type", "'SEQ_2_SEQ_LM'", "SEQ_CLS", "TOKEN_CLS"]),
        ("lora_alpha", None, ["adapter_config.json", "lora_alpha"]),
        ("lora_alpha", "16", ["adapter_config.json", "lora_alpha", "'16'"]),
        ("alpha_pattern", {"query)": 7}, ["adapter_config.json", "alpha_pattern", "'query)'"]),
        ("alpha_pattern", {"query": "seven"}, ["adapter_config.json", "query", "'seven'"]),
        ("alpha_pattern", ["query", 7], ["adapter_config.json", "alpha_pattern"]),
        ("task_type", None, ["--task"]),
    ],
)
def test_unsupported_options_of_peft_are_refused(store, tmp_path, option, value, named):
    refused(store, changed(tmp_path, "peft-everywhere", "adapter_config.json", option, value=value), NAMED, *named)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("original_ln_after", False, ["original_ln_after=False"]),
        ("ln_before", True, ["ln_before=True"]),
        ("ln_after", True, ["ln_after=True"]),
        ("is_parallel", True, ["is_parallel=True"]),
        ("use_gating", True, ["use_gating=True"]),
        ("phm_layer", True, ["phm_layer=True"]),
        ("inv_adapter", "nice", ["inv_adapter='nice'"]),
        ("cross_adapter", True, ["cross_adapter=True"]),
        ("non_linearity", "leakyrelu", ["non_linearity", "'leakyrelu'", "gelu"]),
        ("non_linearity", None, ["adapter_config.json", "non_linearity"]),
        ("scaling", "learned", ["'learned'"]),
        ("architecture", "union", ["architecture", "'union'", "double_seq_bn"]),
    ],
)
def test_unsupported_options_of_a_bottleneck_are_refused(store, tmp_path, option, value, named):
    name = "adapters-stock-head" if option == "scaling" else "adapters-double"
    refused(store, changed(tmp_path, name, "adapter_config.json", "config", option, value=value), ImportOptions(), *named)


@pytest.mark.parametrize(
    ("option", "value"), [("composition_mode", "scale"), ("use_gating", True), ("use_dora", True), ("vera_d", 0.1)]
)
def test_unsupported_options_of_adapterhubs_lora_are_refused(store, tmp_path, option, value):
    folder = changed(tmp_path, "adapters-lora-tag", "adapter_config.json", "config", option, value=value)
    refused(store, folder, ImportOptions(), f"{option}={value!r}", "LoRAConfig")


@pytest.mark.parametrize("option, value", [("alpha", "eight"), ("r", "eight"), ("r", 0)])
def test_options_of_adapterhubs_lora_that_must_be_numbers_are_refused(store, tmp_path, option, value):
    folder = changed(tmp_path, "adapters-lora-tag", "adapter_config.json", "config", option, value=value)
    refused(store, folder, ImportOptions(), folder / "adapter_config.json", option, repr(value))


def test_adapterhubs_usual_bottleneck_is_refused(store):
    refused(store, FIXTURES / "adapters-refused", ImportOptions(), "original_ln_before=True", "double_seq_bn")


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("head_type", "multiple_choice", ["head_type", "'multiple_choice'"]),
        ("use_pooler", True, ["use_pooler=True", 3]),
        ("activation_function", None, ["activation_function", "layers=1"]),
        ("activation_function", "mish", ["activation_function", "'mish'"]),
        ("label2id", {"red": 0, "green": 1, "blue": 3}, ["label2id", "--labels"]),
        ("label2id", None, [3, "--labels"]),
        ("label2id", {"red": 0, "green": 1}, [3, 2, "--labels"]),
    ],
)
def test_unsupported_heads_of_adapterhub_are_refused(store, tmp_path, option, value, named):
    folder = changed(tmp_path, "adapters-double", "head_config.json", "config", option, value=value)
    refused(store, folder, ImportOptions(), *named)


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (None, [3, "--labels"]),
        (["a", "b"], [3, 2, "--labels"]),
        (["a", "b", "a"], ["['a', 'b', 'a']", "--labels"]),
    ],
)
def test_wrong_labels_are_refused(store, labels, named):
    refused(store, FIXTURES / "peft-everywhere", ImportOptions(labels=labels), *named)


def test_a_file_instead_of_its_folder_is_refused(store):
    file = FIXTURES / "peft-everywhere" / "adapter_model.safetensors"
    refused(store, file, NAMED, file / "adapter_config.json", "--from")


def test_another_task_than_the_adapters_is_refused(store):
    refused(store, FIXTURES / "adapters-lora-tag", ImportOptions(task="classify"), "tag", "classify", "--task")


def test_a_task_without_a_head_in_these_libraries_is_refused(store, tmp_path):
    silent = changed(tmp_path, "peft-everywhere", "adapter_config.json", "task_type", value=None)
    refused(store, silent, ImportOptions(task="span"), "'span'")
    refused(store, silent, ImportOptions(task="guess"), "'guess'")


def with_config(folder: Path, name: str, problem_type: str) -> Path:
    """Returns a copy of a fixture with the whole model's configuration beside the adapter."""
    copy = copied(folder, name)
    (copy / "config.json").write_text(json.dumps({"problem_type": problem_type}))
    return copy


@pytest.mark.parametrize("name", ["peft-everywhere", "adapters-stock-head"])
@pytest.mark.parametrize(
    ("problem_type", "options", "named"),
    [
        ("multi_label_classification", {"task": "classify"}, ["multilabel", "classify", "--task"]),
        ("regression", {}, ["--labels"]),
        ("regression", {"labels": None}, [3]),
        ("ranking", {}, ["problem_type", "'ranking'", "single_label_classification"]),
    ],
)
def test_unsupported_kinds_of_classifiers_are_refused(store, tmp_path, name, problem_type, options, named):
    refused(store, with_config(tmp_path, name, problem_type), ImportOptions(**{"labels": LABELS, **options}), *named)


def test_adapters_of_lower_layers_are_refused(store, tmp_path):
    refused(store, FIXTURES / "peft-lower", NAMED, "0, 1", "layers_to_transform", 2, 3, "--as-domain")
    new = NewDomain("low", [corpus(tmp_path, 1)], min_tokens=1)
    refused(store, FIXTURES / "adapters-lower", ImportOptions(new_domain=new), "bottleneck", "0, 1", "leave_out", 2, 3)
    refused(store, FIXTURES / "peft-everywhere", ImportOptions(labels=LABELS, new_domain=new), "--as-domain")
    few = ImportOptions(labels=LABELS, new_domain=NewDomain("low", [corpus(tmp_path, 1)]))
    refused(store, FIXTURES / "peft-lower", few, "50,000", "--min-tokens")
    assert not store.work_folder("low", 1).exists()


def test_layers_that_the_backbone_lacks_are_refused(tmp_path):
    cut = Store(make_imported_store(tmp_path, lower=2, upper=1))
    refused(cut, FIXTURES / "peft-everywhere", NAMED, 3, "'tiny'", 2, 1)


def tensors_changed(folder: Path, change) -> Path:
    copy = copied(folder, "peft-everywhere")
    file = copy / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return copy


LAYER = "base_model.model.bert.encoder.layer.2.attention.self.query"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(f"{LAYER}.lora_B.weight"), [f"'{LAYER.removeprefix('base_model.model.')}'"]),
        (lambda t: t.update({f"{LAYER}.lora_A.weight": torch.zeros(4, 48)}), ["(4, 48)", "'tiny'", "(4, 32)"]),
        (
            lambda t: t.update({f"{LAYER}.lora_A.weight": torch.zeros(0, 32)}),
            [f"'{LAYER.removeprefix('base_model.model.')}'", 0],
        ),
        (lambda t: t.update({f"{LAYER}.lora_magnitude_vector": torch.ones(32)}), ["lora_magnitude_vector"]),
        (lambda t: t.update({"base_model.model.bert.embeddings.lora_embedding_A": torch.ones(1)}), ["lora_embedding_A"]),
        (lambda t: t.update({f"base_model.model.x.lora_{i}.weight": torch.ones(1, 1) for i in "AB"}), ["'x'"]),
        (lambda t: t.update({"base_model.model.bert.embeddings.norm": torch.ones(32)}), ["embeddings.norm"]),
        (lambda t: [t.pop(f"base_model.model.classifier.{part}") for part in ("weight", "bias")], ["modules_to_save"]),
        (lambda t: t.update({"base_model.model.classifier.weight": torch.ones(3, 48)}), ["weight", "(3, 48)"]),
        (lambda t: t.update({"base_model.model.classifier.weight": torch.full((3, 32), 1e6)}), ["weight", "fp16"]),
    ],
)
def test_unexpected_tensors_are_refused(store, tmp_path, change, named):
    refused(store, tensors_changed(tmp_path, change), NAMED, *named)


def test_missing_and_damaged_files_are_refused(store, tmp_path):
    refused(store, tmp_path, NAMED, tmp_path / "adapter_config.json")
    folder = copied(tmp_path, "peft-everywhere")
    (folder / "adapter_model.safetensors").write_bytes(b"cut")
    refused(store, folder, NAMED, folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    refused(store, folder, NAMED, folder, "adapter_model.safetensors", "adapter_model.bin", "--from")
    (folder / "adapter_config.json").write_text("{}")
    refused(store, folder, NAMED, folder / "adapter_config.json", "peft", "adapters")
    headless = copied(tmp_path, "adapters-double")
    (headless / "head_config.json").unlink()
    refused(store, headless, ImportOptions(), headless, "with_head=True")


def test_a_pickle_that_would_run_code_is_refused(store, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    folder = copied(tmp_path, "peft-tag-patterns")
    torch.save({"a": Evil()}, folder / "adapter_model.bin")
    refused(store, folder, NAMED, folder / "adapter_model.bin")
    assert not (tmp_path / "ran").exists()


def test_a_missing_pooler_is_refused(tmp_path):
    folder = make_imported_store(tmp_path)
    base = tmp_path / "base"
    tensors = {name: tensor for name, tensor in load_file(base / "model.safetensors").items() if "pooler" not in name}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    refused(Store(folder), FIXTURES / "peft-everywhere", NAMED, "pooler", base)
    import_tenant(Store(folder), "own", FIXTURES / "peft-pooler", NAMED, CPU)  # has a pooler of its own
    shutil.rmtree(base)
    with pytest.raises(InvalidInput, match=mentioning("pooler", base)):
        import_tenant(Store(folder), "acme", FIXTURES / "peft-everywhere", NAMED, CPU)
    save_base(base)
    import_tenant(Store(folder), "acme", FIXTURES / "peft-everywhere", NAMED, CPU)
