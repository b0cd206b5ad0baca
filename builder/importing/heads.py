"""Converts heads to our layouts: one linear layer, or two. BERT's pooler becomes the first of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from builder.importing.foreign import ForeignHead, read_json
from builder.tasks.tasks import training_task
from hplm.adapters.layout import head_layout
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.layer import ACTIVATIONS
from hplm.model.original import silent_transformers, weights_of
from hplm.tasks import find_task

TASK_OF_CLASS = {"BertForSequenceClassification": "classify", "BertForTokenClassification": "tag"}
TASK_OF_PROBLEM = {
    "single_label_classification": "classify",
    "multi_label_classification": "multilabel",
    "regression": "regress",
}
IMPORTED = sorted({*TASK_OF_CLASS.values(), *TASK_OF_PROBLEM.values()})  # the tasks for which these libraries save heads


Linear = tuple[Tensor, Tensor | None]  # the weight and the bias of a layer


def linear_head(weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    return {"weight": weight, "bias": torch.zeros(len(weight)) if bias is None else bias}


def double_head(first: Linear, last: Linear) -> dict[str, Tensor]:
    dense = linear_head(*first)
    return {"dense": dense["weight"], "dense_bias": dense["bias"], **linear_head(*last)}


def classifier(
    path: Path,
    source: Path,
    linear: Linear,
    trained: str | None,
    given: str | None,
    labels: list[str] | None,
    pooler: Callable[[], Linear],
) -> ForeignHead:
    """Reads a head of transformers' own classes: a linear layer on the pooler or on each token.

    `path`: its configuration, `trained`: the task that it names, `given`: the task that the user names.
    """
    if trained is not None and find_task(trained).reads_first_token:
        trained = sequence_task(path.parent, len(linear[0]), given)
    task = chosen_task(given, trained, path)
    if not find_task(task).reads_first_token:
        return ForeignHead(source, task, linear_head(*linear), None, labels)
    return ForeignHead(source, task, double_head(pooler(), linear), "tanh", labels)


def base_pooler(model: str, why: Path) -> Linear:
    """Reads the pooler, a dense layer and tanh on the first token's state, of the checkpoint that the store was made from."""
    way_out = "save the adapter with its pooler (peft: modules_to_save=['classifier', 'pooler']), or train a head without one"
    try:
        loaded, report = weights_of(model, silent_transformers().AutoModel)
    except InvalidInput as error:
        raise InvalidInput(f"{why} reads the pooler of the model that the store was made from. {error}: {way_out}") from error
    pooler = getattr(loaded, "pooler", None)
    if pooler is None or any("pooler" in name for name in report["missing_keys"]):
        raise InvalidInput(f"{why} reads BERT's pooler, which {model!r} lacks: {way_out}")
    return pooler.dense.weight.detach(), pooler.dense.bias.detach()


def known_function(name: str, source: Path, option: str) -> str:
    """Returns our name of the function. These libraries have two names for some."""
    ours = {"swish": "silu"}.get(name.lower(), name.lower())
    if ours not in ACTIVATIONS:
        raise InvalidInput(f"{source}: {option} {name!r} is not supported: train with one of {', '.join(ACTIVATIONS)}")
    return ours


def labels_by_id(stored: Mapping[str, Any], source: Path) -> list[str] | None:
    """Reads `label2id` or `id2label`; None if there is neither."""
    label2id = stored.get("label2id")
    if not label2id and stored.get("id2label"):
        label2id = {label: int(number) for number, label in stored["id2label"].items()}
    if not label2id:
        return None
    by_id = {int(number): str(label) for label, number in label2id.items()}
    if sorted(by_id) != list(range(len(label2id))):
        raise InvalidInput(f"{source}: label2id does not number its labels 0, 1, 2, ...: give --labels in their order")
    return [by_id[number] for number in range(len(by_id))]


def chosen_labels(task: str, given: list[str] | None, found: list[str] | None, rows: int, source: Path) -> list[str]:
    """Returns the given labels, else those in the files: one a row of the head."""
    wanted = training_task(task)
    if fixed := list(wanted.served.fixed_labels):
        if given:
            raise InvalidInput(f"{source} answers as every {task} does, without labels of its own: leave --labels out")
        if rows != len(fixed):
            raise InvalidInput(
                f"{source} has {rows} outputs, where a {task} has {len(fixed)} ({', '.join(fixed)}): train such a head"
            )
        return fixed
    if rows < wanted.fewest_labels:
        raise InvalidInput(f"{source} has a single output, which tells no labels apart: train with 2 labels or more")
    labels = given or found
    if labels is None:
        raise InvalidInput(f"{source} does not name the labels of its {rows} outputs: give --labels a,b,... in order of id")
    if len(labels) != rows:
        raise InvalidInput(f"{source} has {rows} outputs, and there are {len(labels)} labels: give --labels for each, in order")
    if len(set(labels)) != len(labels) or not all(labels):
        raise InvalidInput(f"{source}: the labels {labels} are not all different and not empty: give --labels")
    return labels


def model_config(folder: Path) -> dict[str, Any]:
    """Reads transformers' configuration of the whole model, if it lies beside the adapter."""
    path = folder / "config.json"
    return read_json(path) if path.exists() else {}


def sequence_task(folder: Path, outputs: int, given: str | None) -> str:
    """Returns the task of transformers' classifier: as its configuration says, else as transformers guesses."""
    problem = model_config(folder).get("problem_type")
    if problem is None:
        # Exclusive labels and independent labels look the same in the files.
        several = "multilabel" if given == "multilabel" else "classify"
        return "regress" if outputs == 1 else several
    if problem not in TASK_OF_PROBLEM:
        raise InvalidInput(
            f"{folder / 'config.json'}: problem_type {problem!r} is not supported: train for {' or '.join(TASK_OF_PROBLEM)}"
        )
    return TASK_OF_PROBLEM[problem]


def chosen_task(given: str | None, found: str | None, source: Path) -> str:
    if given and found and given != found:
        raise InvalidInput(f"{source} is trained to {found}, not to {given}: leave --task out")
    choice = f"{', '.join(IMPORTED[:-1])} or {IMPORTED[-1]}"
    if not (given or found):
        raise InvalidInput(f"{source} does not say what it was trained for: give --task {choice}")
    if (task := given or found) not in IMPORTED:
        raise InvalidInput(f"{source} cannot hold a head for the task {task!r}: give --task {choice}")
    return task


def reordered(weights: dict[str, Tensor], labels: list[str], wanted: list[str]) -> dict[str, Tensor]:
    """Returns a head with its rows in the order of `wanted`, the order of the logits that clients know."""
    rows = [labels.index(label) for label in wanted]
    return {name: part[rows] if name in ("weight", "bias") else part for name, part in weights.items()}


def check_head(weights: Mapping[str, Tensor], function: str | None, config: BackboneConfig, source: Path) -> None:
    for name, shape in head_layout(config, len(weights["weight"]), function).shapes.items():
        if tuple(weights[name].shape) != shape:
            raise InvalidInput(
                f"{source} has {name} of the head as {tuple(weights[name].shape)}, backbone {config.name!r} needs {shape}: "
                "import into a store made from the model that the head was trained on"
            )
