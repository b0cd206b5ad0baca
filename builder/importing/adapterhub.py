"""Adapters saved by AdapterHub's `adapters`: bottlenecks and LoRA, with the head that was saved beside them.

The options of a bottleneck say what it reads and where it adds. With `original_ln_before` off and `original_ln_after` on
it reads a projection's output y and adds scaling . up(f(down(y))) to it; BERT's own sum and norm follow, as in ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from builder.importing.foreign import (
    PLACES,
    Changes,
    Foreign,
    ForeignHead,
    Part,
    number,
    read_json,
    read_tensors,
    required,
    tensor_file,
)
from builder.importing.heads import (
    TASK_OF_CLASS,
    Linear,
    base_pooler,
    chosen_task,
    classifier,
    double_head,
    known_function,
    labels_by_id,
    linear_head,
)
from hplm.errors import InvalidInput

FILES = ("adapter.safetensors", "pytorch_adapter.bin")
HEAD_FILES = ("model_head.safetensors", "pytorch_model_head.bin")
HEAD_TASKS = {"classification": "classify", "multilabel_classification": "multilabel", "tagging": "tag"}
LORA = re.compile(rf"(?:bert\.)?encoder\.layer\.(\d+)\.({'|'.join(map(re.escape, PLACES))})\.loras\..+\.lora_([AB])")
BOTTLENECK_PLACES = {"attention.output": "attention_out", "output": "ffn_out"}
BOTTLENECK = re.compile(
    rf"(?:bert\.)?encoder\.layer\.(\d+)\.({'|'.join(map(re.escape, BOTTLENECK_PLACES))})\.adapters\..+\."
    r"(adapter_down\.0\.weight|adapter_down\.0\.bias|adapter_up\.weight|adapter_up\.bias|scaling)"
)
BOTTLENECK_PARTS = {
    "adapter_down.0.weight": "down",
    "adapter_down.0.bias": "down_bias",
    "adapter_up.weight": "up",
    "adapter_up.bias": "up_bias",
    "scaling": "scaling",
}
# The value of each option that can be imported, and why others cannot.
BOTTLENECK_OPTIONS = {
    "original_ln_before": (False, "the adapter reads the sum after BERT's norm, not a projection's output (seq_bn, pfeiffer)"),
    "original_ln_after": (True, "BERT's own norm is left out"),
    "ln_before": (False, "the adapter has a norm of its own"),
    "ln_after": (False, "the adapter has a norm of its own"),
    "is_parallel": (False, "the adapter reads what goes into the layer's half, not what comes out (par_bn)"),
    "use_gating": (False, "the adapter's share depends on the text"),
    "phm_layer": (False, "its matrices are sums of Kronecker products (compacter)"),
    "inv_adapter": (None, "it changes word embeddings"),
    "cross_adapter": (False, "BERT has no cross attention"),
}
LORA_OPTIONS = {
    "composition_mode": ("add", "it scales instead of adding (ia3)"),
    "use_gating": (False, "the adapter's share depends on the text"),
    "use_dora": (False, "DoRA rescales the shared weights"),
    "vera_d": (None, "VeRA's matrices are shared and random"),
}


def is_adapterhub(config: Mapping[str, Any]) -> bool:
    return "config" in config and "model_type" in config


def read_adapterhub(folder: Path, model: str, task: str | None) -> Foreign:
    """Reads a saved adapter. `model`: the checkpoint whose pooler the head reads, if it reads one."""
    path = folder / "adapter_config.json"
    stored = read_json(path)
    config = stored["config"]
    if not isinstance(config, dict):
        raise InvalidInput(f"{path} only names its configuration ({config!r}): load it and save it with `adapters` 1.x")
    if stored["model_type"] != "bert":
        raise InvalidInput(f"{path}: model_type {stored['model_type']!r}: only adapters of BERT models can be imported")
    source = tensor_file(folder, FILES)
    architecture = config.get("architecture") or "bottleneck"
    function = "relu"
    if architecture == "bottleneck":
        _check(config, BOTTLENECK_OPTIONS, path, "train double_seq_bn, or a BnConfig with original_ln_before=False")
        function = known_function(required(config, "non_linearity", path), path, "non_linearity")
        changes = _bottlenecks(config, source)
    elif architecture == "lora":
        _check(config, LORA_OPTIONS, path, "train a plain LoRAConfig")
        if (rank := number(config, "r", path)) <= 0:
            raise InvalidInput(f"{path}: r is {rank}, but a LoRA has a rank of 1 or more: save the adapter again")
        changes = _loras(number(config, "alpha", path) / rank, source)
        if other := {len(part["a"]) for parts in changes.values() for part in parts.values()} - {rank}:
            raise InvalidInput(f"{path}: r is {rank:g}, but {source} has a LoRA of rank {other.pop()}: save the adapter again")
    else:
        raise InvalidInput(f"{path}: architecture {architecture!r} is not supported: train a double_seq_bn or a LoRA")
    library, base, head = f"adapters {architecture}", stored.get("model_name"), _head(folder, model, task)
    return Foreign(source, library, base, architecture, function, changes, "leave_out=[...]", head)


def _check(config: Mapping[str, Any], options: Mapping[str, tuple[Any, str]], path: Path, way_out: str) -> None:
    for option, (wanted, reason) in options.items():
        if config.get(option, wanted) != wanted:
            raise InvalidInput(f"{path}: {option}={config[option]!r} is not supported, {reason}: {way_out}")


def _changes(source: Path, pattern: re.Pattern[str], places: Mapping[str, str], parts: Mapping[str, str]) -> Changes:
    """Reads the tensors whose names say layer, place and part."""
    changes: Changes = {}
    for name, tensor in read_tensors(source).items():
        if (found := pattern.fullmatch(name)) is None:
            raise InvalidInput(f"{source} has {name!r}, which no plain adapter on a BERT layer has: train one without it")
        changes.setdefault(int(found[1]), {}).setdefault(places[found[2]], {})[parts[found[3]]] = tensor
    return changes


def _bottlenecks(config: Mapping[str, Any], source: Path) -> Changes:
    fixed, changes = config.get("scaling", 1.0), _changes(source, BOTTLENECK, BOTTLENECK_PLACES, BOTTLENECK_PARTS)
    return {layer: {place: _scaled(part, fixed, source) for place, part in parts.items()} for layer, parts in changes.items()}


def _scaled(part: Part, fixed: float | str, source: Path) -> Part:
    """Folds the scale into the output weights: one number, fixed or learned, or one a channel."""
    if missing := {"down", "down_bias", "up", "up_bias"} - part.keys():
        raise InvalidInput(f"{source} lacks {', '.join(sorted(missing))} of a bottleneck: save the adapter again")
    if "scaling" in part:
        scale = part["scaling"]
    elif isinstance(fixed, str):
        raise InvalidInput(f"{source} lacks the scaling that its configuration ({fixed!r}) says was learned: save it again")
    else:
        scale = part["down"].new_tensor([fixed])
    scaled = {"up": part["up"] * scale.unsqueeze(1), "up_bias": part["up_bias"] * scale}
    return {"down": part["down"], "down_bias": part["down_bias"], **scaled}


def _loras(scale: float, source: Path) -> Changes:
    changes = _changes(source, LORA, {name: place for name, (place,) in PLACES.items()}, {"A": "a", "B": "b"})
    for layer, parts in changes.items():
        for place, part in parts.items():
            if part.keys() != {"a", "b"}:
                raise InvalidInput(f"{source} has only one of A and B of {place} in layer {layer}: save the adapter again")
            part["b"] = part["b"] * scale
    return changes


def _head(folder: Path, model: str, task: str | None) -> ForeignHead:
    path = folder / "head_config.json"
    if not path.exists():
        raise InvalidInput(f"{folder} has no head: save it with the adapter, save_adapter(..., with_head=True)")
    stored = read_json(path)
    source = tensor_file(folder, HEAD_FILES)
    tensors = read_tensors(source)
    if stored.get("config") is None:
        return _stock_head(stored, tensors, source, path, model, task)
    config = stored["config"]
    if config.get("head_type") not in HEAD_TASKS:
        kinds = " or ".join(HEAD_TASKS)
        raise InvalidInput(f"{path}: head_type {config.get('head_type')!r} is not supported: train a head for {kinds}")
    linears = _linears(tensors, source)
    trained = HEAD_TASKS[config["head_type"]]
    if trained == "classify" and len(linears[-1][0]) == 1:
        trained = "regress"  # `adapters` has no other head for regression
    task = chosen_task(task, trained, path)
    pooled = bool(config.get("use_pooler"))
    if len(linears) + pooled > 2:
        raise InvalidInput(
            f"{path}: layers={len(linears)} with use_pooler={pooled} makes {len(linears) + pooled} layers, ours have at most "
            "two: train a head with fewer"
        )
    labels = labels_by_id(config, path)
    if pooled:
        return ForeignHead(source, task, double_head(base_pooler(model, path), linears[0]), "tanh", labels)
    if len(linears) == 1:
        return ForeignHead(source, task, linear_head(*linears[0]), None, labels)
    if not config.get("activation_function"):
        raise InvalidInput(f"{path}: two layers without activation_function are not supported: train a head with layers=1")
    function = known_function(config["activation_function"], path, "activation_function")
    return ForeignHead(source, task, double_head(linears[0], linears[1]), function, labels)


def _linears(tensors: Mapping[str, Tensor], source: Path) -> list[Linear]:
    """Returns the linear layers in order. The numbers in their names also count layers without weights."""
    numbered: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"heads\..+\.(\d+)\.(weight|bias)", name)
        if found is None:
            raise InvalidInput(f"{source} has {name!r}, which is no layer of a head: save the head again")
        numbered.setdefault(int(found[1]), {})[found[2]] = tensor
    if not numbered or any("weight" not in layer for layer in numbered.values()):
        raise InvalidInput(f"{source} lacks weights of the head: save the head again")
    return [(numbered[number]["weight"], numbered[number].get("bias")) for number in sorted(numbered)]


def _stock_head(
    stored: Mapping[str, Any], tensors: dict[str, Tensor], source: Path, path: Path, model: str, task: str | None
) -> ForeignHead:
    """Reads a head of transformers' own classes: a linear layer on the pooler or on each token."""
    task_of_class = TASK_OF_CLASS.get(stored.get("model_class", ""))
    if task_of_class is None:
        raise InvalidInput(f"{path}: model_class {stored.get('model_class')!r} is not supported: {' or '.join(TASK_OF_CLASS)}")
    if tensors.keys() != {"classifier.weight", "classifier.bias"}:
        raise InvalidInput(f"{source} has {sorted(tensors)}, not a classifier's weight and bias: save the head again")
    linear = (tensors["classifier.weight"], tensors["classifier.bias"])
    labels = labels_by_id(stored, path)
    return classifier(path, source, linear, task_of_class, task, labels, lambda: base_pooler(model, path))
