"""Reads heads and converts them to our layouts: one linear layer, or two. BERT's pooler becomes the first of two."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from builder.importing.foreign import ADAPTER_CONFIG, CONFIG, ForeignHead, Tensors, accepted, read_json
from builder.tasks.tasks import training_task
from hplm.adapters.heads import SIZES
from hplm.errors import InvalidInput
from hplm.model.families import WEIGHT_AND_BIAS
from hplm.model.original import silent_transformers, weights_of
from hplm.tasks.tasks import find_task

CLASSIFY, TAG, SPAN = "classify", "tag", "span"
SEQUENCE = "ForSequenceClassification"
TASK_OF_ENDING = {SEQUENCE: CLASSIFY, "ForTokenClassification": TAG, "ForQuestionAnswering": SPAN}  # of the names of classes
TASK_OF_PROBLEM = {
    "single_label_classification": "classify",
    "multi_label_classification": "multilabel",
    "regression": "regress",
}
IMPORTED = sorted({CLASSIFY, TAG, *TASK_OF_PROBLEM.values()})  # the tasks whose heads can be imported
TASK_OF_TYPE = {"SEQ_CLS": "classify", "TOKEN_CLS": "tag"}  # of peft
LAST_OF_TASK = {TAG: "classifier", SPAN: "qa_outputs"}  # the layer that gives a token's logits
# The first layer of a text's classifier, the function behind it, and the second layer.
LAYERS = {
    "bert": ("bert.pooler.dense", "tanh", "classifier"),
    "distilbert": ("pre_classifier", "relu", "classifier"),
    "electra": ("classifier.dense", "gelu", "classifier.out_proj"),
    "eurobert": ("dense", "gelu", "classifier"),
    "modernbert": ("head.dense", "gelu_norm", "classifier"),
    "nomic_bert": ("nomic_bert.pooler.dense", "tanh", "classifier"),
}
LAYERS_OF_OTHERS = ("classifier.dense", "tanh", "classifier.out_proj")
POOLING, MEAN, LATE = "classifier_pooling", "mean", "late"  # of a configuration, and its values beside the first token
NORM = "head.norm"  # behind the function of a `gelu_norm`, which its second layer takes up
EVERY_TASK = ("modernbert",)  # families whose heads have two layers for each task

Linear = tuple[Tensor, Tensor | None]  # the weight and the bias of a layer


def head_of(*layers: Linear) -> dict[str, Tensor]:
    """Returns the tensors of a head of one layer or of two."""
    parts = [part for weight, bias in layers for part in (weight, torch.zeros(len(weight)) if bias is None else bias)]
    return dict(zip(("dense", "dense_bias", "weight", "bias")[-len(parts) :], parts, strict=True))


def peft_head(
    source: Path,
    config: Mapping[str, Any],
    saved: Tensors,
    changes: dict[str, Tensors],
    model: str,
    task: str | None,
    kind: str,
) -> ForeignHead:
    """Reads the head of a saved LoRA: modules that were saved whole. Takes the LoRA of the first layer out of `changes`.

    `kind`: of the model.
    """
    path, (first, function, last) = source.with_name(ADAPTER_CONFIG), LAYERS.get(kind, LAYERS_OF_OTHERS)
    stated = accepted(config, "task_type", (False, *TASK_OF_TYPE), f"train with {' or '.join(TASK_OF_TYPE)}", path)
    endings, mapping = [ending for ending, own in TASK_OF_ENDING.items() if own in IMPORTED], config.get("auto_mapping") or {}
    ending = re.sub(".*(?=For)", "", mapping.get("base_model_class") or "")
    accepted(mapping | {"base_model_class": ending}, "base_model_class", (False, *endings), f"train with {endings}", path)
    of_first = rf"(?:{kind}\.)?{re.escape(first.removeprefix(f'{kind}.'))}"
    first_changes = [changes.pop(name) for name in list(changes) if re.fullmatch(of_first, name)]
    parts = {name: saved.pop(name) for name in list(saved) if re.match(rf"({of_first}|{NORM})\.", name)}
    last = last if f"{last}.weight" in saved else LAST_OF_TASK[TAG]
    weight, bias = saved.pop(f"{last}.weight", None), saved.pop(f"{last}.bias", None)
    if saved:
        modules = sorted({name.removeprefix(f"{kind}.").partition(".")[0] for name in (first, last)})
        raise InvalidInput(
            f"{source} holds {min(saved)!r} whole, which is no part of a {kind} classifier: modules_to_save may name {modules}"
        )
    if weight is None:
        raise InvalidInput(f"{source} has no classifier: train with task_type, or with modules_to_save=['classifier']")
    trained = TASK_OF_TYPE.get(stated or "") or TASK_OF_ENDING.get(ending)
    labels = numbered_labels(model_config(path.parent))

    @cache
    def base() -> dict[str, Tensor]:
        return _base_head(model, source, first) | parts

    def first_layer() -> Linear:
        own = {name.rpartition(".")[2]: part for name, part in parts.items() if not name.startswith(NORM)}
        if "weight" not in own:
            own = {which: base()[f"{first}.{which}"] for which in WEIGHT_AND_BIAS if f"{first}.{which}" in base()}
        return own["weight"] + sum(change["b"] @ change["a"] for change in first_changes), own.get("bias")

    last_layer = weight, bias
    if kind in EVERY_TASK:
        last_layer = folded(last_layer, parts if f"{NORM}.weight" in parts else base())
    return classifier(path, source, last_layer, trained, task, labels, first_layer, function, kind in EVERY_TASK)


def folded(last: Linear, tensors: Mapping[str, Tensor]) -> Linear:
    """Returns the second layer of a `gelu_norm` with the scale and shift of its norm."""
    (weight, bias), scale, shift = last, tensors[f"{NORM}.weight"], tensors.get(f"{NORM}.bias")
    return weight * scale, bias if shift is None else weight @ shift + (0 if bias is None else bias)


def classifier(
    path: Path, source: Path, linear: Linear, trained: str | None, given: str | None, labels: list[str] | None,
    first: Callable[[], Linear], function: str = "tanh", every_task: bool = False,
) -> ForeignHead:  # fmt: skip
    """Reads a head of transformers' own classes: a linear layer on each token, or behind a first layer and a function.

    `path`: its configuration, `trained`: the task that it names, `given`: the task that the user names. `every_task`: a linear
    layer on each token is behind a first one too.
    """
    if (named := trained or given) and find_task(named).reads_first_token:
        trained = sequence_task(path.parent, len(linear[0]), given)
    task = chosen_task(given, trained, path)
    if not (find_task(task).reads_first_token or every_task):
        return ForeignHead(source, task, head_of(linear), None, labels)
    return ForeignHead(source, task, head_of(first(), linear), function, labels)


def _base_head(model: str, why: Path, first: str) -> dict[str, Tensor]:
    """Reads a classifier's first layer, such as BERT's pooler, of the checkpoint that the store was made from."""
    module = first.split(".")[-2 if "." in first else -1]
    way_out = f"save the adapter with it (peft: modules_to_save=['classifier', {module!r}]), or train a head without one"
    try:
        loaded, report = weights_of(model, getattr(silent_transformers(), f"AutoModel{SEQUENCE}"))
        if any(name.startswith(f"{first}.") for name in report["missing_keys"]):
            raise InvalidInput("it has none")
    except InvalidInput as error:
        raise InvalidInput(f"{why} reads {module!r} of {model!r}, which the store was made from. {error}: {way_out}") from error
    return {name: tensor.detach() for name, tensor in loaded.state_dict().items()}


def numbered_labels(stored: Mapping[str, Any]) -> list[str] | None:
    """Reads `label2id` or `id2label`; None if neither numbers labels 0, 1, 2, ..."""
    pairs = [(number, label) for label, number in (stored.get("label2id") or {}).items()]
    by_id = {int(number): str(label) for number, label in pairs or (stored.get("id2label") or {}).items()}
    is_numbered = sorted(by_id) == list(range(max(len(pairs), len(by_id))))
    return [by_id[number] for number in range(len(by_id))] or None if is_numbered else None


def chosen_labels(task: str, given: list[str] | None, found: list[str] | None, rows: int, source: Path) -> list[str]:
    """Returns the given labels, else those in the files: one a row of the head."""
    wanted = training_task(task)
    fixed = [*wanted.served.fixed_labels]
    if fixed and given:
        raise InvalidInput(f"{source} answers as every {task} does, without labels of its own: leave --labels out")
    if not fixed and rows < wanted.fewest_labels:
        raise InvalidInput(f"{source} has a single output, which tells no labels apart: train with 2 labels or more")
    if rows > SIZES[-1]:
        raise InvalidInput(f"{source} has {rows:,} outputs, and heads go up to {SIZES[-1]:,}: leave this model dedicated")
    if (labels := fixed or given or found) is None:
        raise InvalidInput(
            f"{source} does not name the labels of its {rows} outputs 0, 1, 2, ...: give --labels a,b,... in order of id"
        )
    if len(labels) != rows:
        way_out = f"train a head for {task}" if fixed else "give --labels for each, in order"
        raise InvalidInput(f"{source} has {rows} outputs, and there are {len(labels)} labels ({', '.join(labels)}): {way_out}")
    if len(set(labels)) != len(labels) or not all(labels):
        raise InvalidInput(f"{source}: the labels {labels} are not all different and not empty: give --labels")
    return labels


def model_config(folder: Path) -> dict[str, Any]:
    """Reads transformers' configuration of the whole model, if it lies beside the adapter."""
    return read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}


def sequence_task(folder: Path, outputs: int, given: str | None) -> str:
    """Returns the task of transformers' classifier: as its configuration says, else as transformers guesses."""
    # Exclusive labels and independent labels look the same in the files.
    guessed = "regress" if outputs == 1 else "multilabel" if given == "multilabel" else "classify"
    way_out = f"train for {' or '.join(TASK_OF_PROBLEM)}"
    problem = accepted(model_config(folder), "problem_type", (False, *TASK_OF_PROBLEM), way_out, folder / CONFIG)
    return TASK_OF_PROBLEM[problem] if problem else guessed


def chosen_task(given: str | None, found: str | None, source: Path) -> str:
    if given and found and given != found:
        raise InvalidInput(f"{source} is trained to {found}, not to {given}: leave --task out")
    choice = f"give --task {', '.join(IMPORTED[:-1])} or {IMPORTED[-1]}"
    if not (given or found):
        raise InvalidInput(f"{source} does not say what it was trained for: {choice}")
    if not found and given not in IMPORTED:
        raise InvalidInput(f"{source} cannot hold a head for the task {given!r}: {choice}")
    return found or str(given)


def reordered(weights: dict[str, Tensor], labels: list[str], wanted: list[str]) -> dict[str, Tensor]:
    """Returns a head with its rows in the order of `wanted`, the order of the logits that clients know."""
    rows = [labels.index(label) for label in wanted]
    return {name: part[rows] if name in ("weight", "bias") else part for name, part in weights.items()}
