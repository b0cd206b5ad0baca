"""Reads heads and converts them to our layouts: one linear layer, or two. BERT's pooler becomes the first of two."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from builder.importing.foreign import ADAPTER_CONFIG, CONFIG, ForeignHead, Tensors, accepted, read_json
from builder.tasks.tasks import training_task
from hplm.adapters.heads import SIZES
from hplm.errors import InvalidInput
from hplm.model.original import silent_transformers, weights_of
from hplm.tasks import find_task

TASK_OF_CLASS = {"BertForSequenceClassification": "classify", "BertForTokenClassification": "tag"}
TASK_OF_PROBLEM = {
    "single_label_classification": "classify",
    "multi_label_classification": "multilabel",
    "regression": "regress",
}
IMPORTED = sorted({*TASK_OF_CLASS.values(), *TASK_OF_PROBLEM.values()})  # the tasks whose heads can be imported
TASK_OF_TYPE = {"SEQ_CLS": "classify", "TOKEN_CLS": "tag"}  # of peft
POOLER = r"(?:bert\.)?pooler\.dense"

Linear = tuple[Tensor, Tensor | None]  # the weight and the bias of a layer


def head_of(*layers: Linear) -> dict[str, Tensor]:
    """Returns the tensors of a head of one layer or of two."""
    parts = [part for weight, bias in layers for part in (weight, torch.zeros(len(weight)) if bias is None else bias)]
    return dict(zip(("dense", "dense_bias", "weight", "bias")[-len(parts) :], parts, strict=True))


def peft_head(
    source: Path, config: Mapping[str, Any], saved: Tensors, changes: dict[str, Tensors], model: str, task: str | None
) -> ForeignHead:
    """Reads the head of a saved LoRA: modules that were saved whole. Takes the LoRA of the pooler out of `changes`."""
    path = source.with_name(ADAPTER_CONFIG)
    stated = accepted(config, "task_type", (False, *TASK_OF_TYPE), f"train with {' or '.join(TASK_OF_TYPE)}", path)
    classes, way_out = (False, *TASK_OF_CLASS), f"train with {' or '.join(TASK_OF_CLASS)}"
    base_class = accepted(config.get("auto_mapping") or {}, "base_model_class", classes, way_out, path)
    pooler_changes = [changes.pop(name) for name in list(changes) if re.fullmatch(POOLER, name)]
    pooler_parts = {name.rpartition(".")[2]: saved.pop(name) for name in list(saved) if re.match(POOLER, name)}
    weight, bias = saved.pop("classifier.weight", None), saved.pop("classifier.bias", None)
    if saved:
        raise InvalidInput(
            f"{source} holds {min(saved)!r} whole, which is no part of a BERT classifier: modules_to_save may name "
            "'classifier' and 'pooler'"
        )
    if weight is None:
        raise InvalidInput(f"{source} has no classifier: train with task_type, or with modules_to_save=['classifier']")
    trained = TASK_OF_TYPE.get(stated or "") or TASK_OF_CLASS.get(base_class or "")
    labels = numbered_labels(model_config(path.parent))

    def pooler() -> Linear:
        is_whole = pooler_parts.keys() == {"weight", "bias"}
        weight, bias = (pooler_parts["weight"], pooler_parts["bias"]) if is_whole else _base_pooler(model, source)
        return weight + sum(change["b"] @ change["a"] for change in pooler_changes), bias

    return classifier(path, source, (weight, bias), trained, task, labels, pooler)


def classifier(
    path: Path, source: Path, linear: Linear, trained: str | None, given: str | None, labels: list[str] | None,
    first: Callable[[], Linear], function: str = "tanh",
) -> ForeignHead:  # fmt: skip
    """Reads a head of transformers' own classes: a linear layer on each token, or behind a first layer and a function.

    `path`: its configuration, `trained`: the task that it names, `given`: the task that the user names.
    """
    if (named := trained or given) and find_task(named).reads_first_token:
        trained = sequence_task(path.parent, len(linear[0]), given)
    task = chosen_task(given, trained, path)
    if not find_task(task).reads_first_token:
        return ForeignHead(source, task, head_of(linear), None, labels)
    return ForeignHead(source, task, head_of(first(), linear), function, labels)


def _base_pooler(model: str, why: Path) -> Linear:
    """Reads the pooler, a dense layer and tanh on the first token's state, of the checkpoint that the store was made from."""
    way_out = "save the adapter with its pooler (peft: modules_to_save=['classifier', 'pooler']), or train a head without one"
    try:
        loaded, report = weights_of(model, silent_transformers().AutoModel)
        if (pooler := getattr(loaded, "pooler", None)) is None or any("pooler" in name for name in report["missing_keys"]):
            raise InvalidInput("it has none")
    except InvalidInput as error:
        raise InvalidInput(f"{why} reads the pooler of {model!r}, which the store was made from. {error}: {way_out}") from error
    return pooler.dense.weight.detach(), pooler.dense.bias.detach()


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
