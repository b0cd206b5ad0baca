"""What cannot be imported exactly is refused by name, with the way out, and leaves the store as it was."""

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

NAMED = ImportOptions(labels=LABELS)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    """Refusals change nothing: one store serves them all."""
    return Store(make_imported_store(tmp_path_factory.mktemp("imported")))


def refused(store: Store, folder: Path, options: ImportOptions, match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        import_tenant(store, "acme", folder, options, CPU, show_progress=False)
    assert store.tenants() == [] and store.domains() == [("root", 1)]


def copied(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(FIXTURES / name, folder / name))


def changed(folder: Path, name: str, file: str, *path: str, value: object) -> Path:
    """A fixture with one option set otherwise."""
    copy = copied(folder, name) / file
    stored = inner = json.loads(copy.read_text())
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    copy.write_text(json.dumps(stored))
    return copy.parent


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("peft_type", "LOHA", "peft_type 'LOHA' is not supported: train with LoraConfig"),
        ("bias", "lora_only", "bias='lora_only' changes biases of the shared layers.*bias='none'"),
        ("use_dora", True, "use_dora is not supported, DoRA rescales the shared weights: train without it"),
        ("lora_bias", True, "lora_bias is not supported"),
        ("fan_in_fan_out", True, "fan_in_fan_out is not supported"),
        ("layer_replication", [[0, 4]], "layer_replication is not supported"),
        ("trainable_token_indices", [7], "trainable_token_indices is not supported, it changes word embeddings"),
        ("init_lora_weights", "pissa", "init_lora_weights='pissa' takes its start out of the shared weights"),
        ("task_type", "SEQ_2_SEQ_LM", "task_type 'SEQ_2_SEQ_LM' is not supported: train with SEQ_CLS or TOKEN_CLS"),
        ("lora_alpha", None, "adapter_config.json lacks lora_alpha: save the adapter again"),
        ("task_type", None, "does not say what it was trained for: give --task"),
    ],
)
def test_options_of_peft(store, tmp_path, option, value, match):
    refused(store, changed(tmp_path, "peft-everywhere", "adapter_config.json", option, value=value), NAMED, match)


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("original_ln_after", False, "original_ln_after=False is not supported, BERT's own norm is left out: train"),
        ("ln_before", True, "ln_before=True is not supported"),
        ("ln_after", True, "ln_after=True is not supported"),
        ("is_parallel", True, "is_parallel=True is not supported"),
        ("use_gating", True, "use_gating=True is not supported"),
        ("phm_layer", True, "phm_layer=True is not supported"),
        ("inv_adapter", "nice", "inv_adapter='nice' is not supported, it changes word embeddings"),
        ("cross_adapter", True, "cross_adapter=True is not supported"),
        ("non_linearity", "leakyrelu", "non_linearity 'leakyrelu' is not supported: train with one of gelu"),
        ("non_linearity", None, "adapter_config.json lacks non_linearity"),
        ("scaling", "learned", None),
        ("architecture", "union", "architecture 'union' is not supported: train a double_seq_bn or a LoRA"),
    ],
)
def test_options_of_a_bottleneck(store, tmp_path, option, value, match):
    name = "adapters-stock-head" if option == "scaling" else "adapters-double"
    match = match or "lacks the scaling that its configuration .'learned'. says was learned"
    refused(store, changed(tmp_path, name, "adapter_config.json", "config", option, value=value), ImportOptions(), match)


@pytest.mark.parametrize(
    ("option", "value"), [("composition_mode", "scale"), ("use_gating", True), ("use_dora", True), ("vera_d", 0.1)]
)
def test_options_of_adapterhubs_lora(store, tmp_path, option, value):
    folder = changed(tmp_path, "adapters-lora-tag", "adapter_config.json", "config", option, value=value)
    refused(store, folder, ImportOptions(), f"{option}={value!r} is not supported.*train a plain LoRAConfig")


def test_the_usual_bottleneck_reads_what_ours_cannot(store):
    refused(store, FIXTURES / "adapters-refused", ImportOptions(), "original_ln_before=True.*after BERT's norm.*double_seq_bn")


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("head_type", "multiple_choice", "head_type 'multiple_choice' is not supported"),
        ("use_pooler", True, "makes 3 layers, ours have at most two"),
        ("activation_function", None, "two layers without activation_function"),
        ("activation_function", "mish", "activation_function 'mish' is not supported"),
        ("label2id", {"red": 0, "green": 1, "blue": 3}, "does not number its labels 0, 1, 2"),
        ("label2id", None, "does not name the labels of its 3 outputs: give --labels"),
        ("label2id", {"red": 0, "green": 1}, "has 3 outputs, and there are 2 labels"),
    ],
)
def test_heads_of_adapterhub(store, tmp_path, option, value, match):
    folder = changed(tmp_path, "adapters-double", "head_config.json", "config", option, value=value)
    refused(store, folder, ImportOptions(), match)


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        (None, "does not name the labels of its 3 outputs: give --labels"),
        (["a", "b"], "has 3 outputs, and there are 2 labels"),
        (["a", "b", "a"], "not all different"),
    ],
)
def test_labels(store, labels, match):
    refused(store, FIXTURES / "peft-everywhere", ImportOptions(labels=labels), match)


def test_a_file_instead_of_its_folder(store):
    file = FIXTURES / "peft-everywhere" / "adapter_model.safetensors"
    refused(store, file, NAMED, "adapter_config.json is missing: --from is the folder")


def test_a_task_that_is_not_its_own(store):
    refused(store, FIXTURES / "adapters-lora-tag", ImportOptions(task="classify"), "is trained to tag, not to classify")


def test_a_task_that_these_libraries_save_no_head_for(store, tmp_path):
    silent = changed(tmp_path, "peft-everywhere", "adapter_config.json", "task_type", value=None)
    refused(store, silent, ImportOptions(task="span"), "'span'")
    refused(store, silent, ImportOptions(task="guess"), "'guess'")


def with_config(folder: Path, name: str, problem_type: str) -> Path:
    """With the whole model's configuration beside the adapter."""
    copy = copied(folder, name)
    (copy / "config.json").write_text(json.dumps({"problem_type": problem_type}))
    return copy


@pytest.mark.parametrize("name", ["peft-everywhere", "adapters-stock-head"])
@pytest.mark.parametrize(
    ("problem_type", "options", "match"),
    [
        ("multi_label_classification", {"task": "classify"}, "is trained to multilabel, not to classify: leave --task out"),
        ("regression", {}, "leave --labels out"),
        ("regression", {"labels": None}, "tells 3 numbers a text.*with one output"),
        ("ranking", {}, "problem_type 'ranking' is not supported: train for single_label_classification or"),
    ],
)
def test_kinds_of_classifiers(store, tmp_path, name, problem_type, options, match):
    refused(store, with_config(tmp_path, name, problem_type), ImportOptions(**{"labels": LABELS, **options}), match)


def test_lower_layers(store, tmp_path):
    match = "lower layers .0, 1.*layers_to_transform.* only layers 2 to 3, or give --as-domain"
    refused(store, FIXTURES / "peft-lower", NAMED, match)
    new = NewDomain("low", [corpus(tmp_path, 1)], min_tokens=1)
    match = "a bottleneck in lower layers.*cannot be merged.*leave_out"
    refused(store, FIXTURES / "adapters-lower", ImportOptions(new_domain=new), match)
    refused(store, FIXTURES / "peft-everywhere", ImportOptions(labels=LABELS, new_domain=new), "changes no lower layer.*omit")
    few = ImportOptions(labels=LABELS, new_domain=NewDomain("low", [corpus(tmp_path, 1)]))
    refused(store, FIXTURES / "peft-lower", few, "fewer than 50,000.*lower --min-tokens")
    assert not store.work_folder("low", 1).exists()


def test_layers_that_the_backbone_lacks(tmp_path):
    cut = Store(make_imported_store(tmp_path, lower=2, upper=1))
    refused(cut, FIXTURES / "peft-everywhere", NAMED, "changes layer 3, but backbone 'tiny' has 2 lower and 1 upper layers")


def tensors_changed(folder: Path, change) -> Path:
    copy = copied(folder, "peft-everywhere")
    file = copy / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return copy


LAYER = "base_model.model.bert.encoder.layer.2.attention.self.query"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(f"{LAYER}.lora_B.weight"), "only one of A and B"),
        (lambda t: t.update({f"{LAYER}.lora_A.weight": torch.zeros(4, 48)}), r"as \(4, 48\), backbone 'tiny' needs \(4, 32\)"),
        (lambda t: t.update({f"{LAYER}.lora_magnitude_vector": torch.ones(32)}), "no A and no B"),
        (lambda t: t.update({"base_model.model.bert.embeddings.lora_embedding_A": torch.ones(1)}), "no A and no B"),
        (lambda t: t.update({f"base_model.model.x.lora_{i}.weight": torch.ones(1, 1) for i in "AB"}), "'x', which is no"),
        (lambda t: t.update({"base_model.model.bert.embeddings.norm": torch.ones(32)}), "no part of a BERT"),
        (lambda t: [t.pop(f"base_model.model.classifier.{part}") for part in ("weight", "bias")], "has no classifier"),
        (lambda t: t.update({"base_model.model.classifier.weight": torch.ones(3, 48)}), "weight of the head as"),
        (lambda t: t.update({"base_model.model.classifier.weight": torch.full((3, 32), 1e6)}), "too large for fp16"),
    ],
)
def test_tensors(store, tmp_path, change, match):
    refused(store, tensors_changed(tmp_path, change), NAMED, match)


def test_files(store, tmp_path):
    refused(store, tmp_path, NAMED, "adapter_config.json is missing")
    folder = copied(tmp_path, "peft-everywhere")
    (folder / "adapter_model.safetensors").write_bytes(b"cut")
    refused(store, folder, NAMED, "adapter_model.safetensors cannot be read")
    (folder / "adapter_model.safetensors").unlink()
    refused(store, folder, NAMED, "has neither adapter_model.safetensors nor adapter_model.bin")
    (folder / "adapter_config.json").write_text("{}")
    refused(store, folder, NAMED, "neither of `peft` nor of `adapters`")
    headless = copied(tmp_path, "adapters-double")
    (headless / "head_config.json").unlink()
    refused(store, headless, ImportOptions(), "has no head: save it with the adapter")


def test_a_pickle_that_would_run_code(store, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    folder = copied(tmp_path, "peft-tag-patterns")
    torch.save({"a": Evil()}, folder / "adapter_model.bin")
    refused(store, folder, NAMED, "adapter_model.bin cannot be read")
    assert not (tmp_path / "ran").exists()


def test_a_pooler_that_is_nowhere(tmp_path):
    folder = make_imported_store(tmp_path)
    base = tmp_path / "base"
    tensors = {name: tensor for name, tensor in load_file(base / "model.safetensors").items() if "pooler" not in name}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    match = "reads BERT's pooler, which .* lacks: save the adapter with its pooler"
    refused(Store(folder), FIXTURES / "peft-everywhere", NAMED, match)
    import_tenant(Store(folder), "own", FIXTURES / "peft-pooler", NAMED, CPU)  # brings its own
    shutil.rmtree(base)
    with pytest.raises(InvalidInput, match=r"reads BERT's pooler, and .* cannot be loaded"):
        import_tenant(Store(folder), "acme", FIXTURES / "peft-everywhere", NAMED, CPU)
    save_base(base)
    import_tenant(Store(folder), "acme", FIXTURES / "peft-everywhere", NAMED, CPU)
