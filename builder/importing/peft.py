"""LoRA adapters saved by `peft`: adapter_config.json beside adapter_model.safetensors or .bin."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from builder.importing.foreign import (
    DECODER_PLACES,
    PLACES,
    Changes,
    Foreign,
    ForeignHead,
    Part,
    number,
    read_json,
    read_tensors,
    tensor_file,
)
from builder.importing.heads import TASK_OF_CLASS, Linear, base_pooler, classifier, labels_by_id, model_config
from hplm.errors import InvalidInput

FILES = ("adapter_model.safetensors", "adapter_model.bin")
TASK_OF_TYPE = {"SEQ_CLS": "classify", "TOKEN_CLS": "tag"}
MODULE = re.compile(rf"(?:bert\.)?encoder\.layer\.(\d+)\.({'|'.join(map(re.escape, PLACES))})")
DECODER_MODULE = re.compile(rf"(?:\w+\.)*(?:layers|h)\.(\d+)\.({'|'.join(map(re.escape, DECODER_PLACES))})")
GENERATIVE_TYPE = "CAUSAL_LM"
POOLER = re.compile(r"(?:bert\.)?pooler\.dense")
# Options whose result is not W.x + B.A.x over a shared backbone.
REFUSED = {
    "use_dora": "DoRA rescales the shared weights",
    "lora_bias": "its B has a bias",
    "layer_replication": "it repeats layers",
    "trainable_token_indices": "it changes word embeddings",
    "target_parameters": "it changes bare parameters",
    "use_qalora": "it pools its input",
    "alora_invocation_tokens": "it works on some tokens only",
    "arrow_config": "it mixes several adapters",
    "use_bdlora": "its matrices are block-diagonal",
    "kasa_config": "it scales each rank",
    "monteclora_config": "it draws random weights",
    "megatron_config": "it is split over devices",
}
TRANSPOSED = {"fan_in_fan_out": "it is made for transposed weights, which BERT does not have"}
# Other initialisations subtract something from the shared weights.
KEPT_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


def is_peft(config: Mapping[str, Any]) -> bool:
    return "peft_type" in config


def read_peft(folder: Path, model: str, task: str | None, is_decoder: bool = False) -> Foreign:
    """Reads a saved adapter. `model`: the checkpoint whose pooler the classifier reads, if the adapter has none.

    An adapter of a decoder has no head.
    """
    path = folder / "adapter_config.json"
    config = read_json(path)
    _check_options(config, path, REFUSED if is_decoder else REFUSED | TRANSPOSED)
    if is_decoder and config.get("task_type") not in (None, GENERATIVE_TYPE):
        raise InvalidInput(f"{path}: task_type {config['task_type']!r} is not for decoders: train with {GENERATIVE_TYPE}")
    source = tensor_file(folder, FILES)
    scaled, saved = _tensors(config, path, source)
    if is_decoder and saved:
        raise InvalidInput(f"{source} holds {sorted(saved)[0]!r} whole, which tenants share: train without modules_to_save")
    pooler = [] if is_decoder else [scaled.pop(module) for module in list(scaled) if POOLER.fullmatch(module)]
    named, places_of = (DECODER_MODULE, DECODER_PLACES) if is_decoder else (MODULE, PLACES)
    changes: Changes = {}
    for module, part in scaled.items():
        if (found := named.fullmatch(module)) is None:
            raise InvalidInput(
                f"{source} changes {module!r}, which is no projection of a {'decoder' if is_decoder else 'BERT'} layer: train "
                f"with target_modules among {', '.join(places_of)}"
            )
        places = places_of[found[2]]
        for place, b in zip(places, part["b"].chunk(len(places)), strict=True):
            changes.setdefault(int(found[1]), {})[place] = {"a": part["a"], "b": b}
    head = None if is_decoder else _head(folder, config, saved, pooler, source, model, task)
    base = config.get("base_model_name_or_path")
    return Foreign(source, "peft LoRA", base, "lora", "relu", changes, "layers_to_transform=[...]", head)


def _tensors(config: Mapping[str, Any], path: Path, source: Path) -> tuple[dict[str, Part], dict[str, Tensor]]:
    """Returns A and B of each changed module, with the scale in B, and the tensors of modules that are saved whole."""
    alpha_of, rank_of = (_by_module(config, *names, path) for names in (("lora_alpha", "alpha_pattern"), ("r", "rank_pattern")))
    pairs, saved = dict[str, Part](), dict[str, Tensor]()
    for key, tensor in read_tensors(source).items():
        name = key.removeprefix("base_model.model.")
        module, _, part = name.rpartition(".lora_")
        if not module:
            saved[name] = tensor
        elif part in ("A.weight", "B.weight"):
            pairs.setdefault(module, {})[part[0].lower()] = tensor
        else:
            raise InvalidInput(f"{source} has {key!r}, which is no A and no B of a LoRA: train a plain LoRA")
    for module, pair in pairs.items():
        if pair.keys() != {"a", "b"}:
            raise InvalidInput(f"{source} has only one of A and B of {module!r}: save the adapter again")
        if not (rank := len(pair["a"])):
            raise InvalidInput(f"{source} has a LoRA of rank 0 of {module!r}: save the adapter again")
        if rank != rank_of(module):
            raise InvalidInput(
                f"{source} has a LoRA of rank {rank} of {module!r}, and {path.name} says {rank_of(module):g}, on which its "
                "scale depends: correct r or rank_pattern there, or save the adapter again"
            )
        pair["b"] = pair["b"] * (alpha_of(module) / (sqrt(rank) if config.get("use_rslora") else rank))
    return pairs, saved


def _check_options(config: Mapping[str, Any], path: Path, refused: Mapping[str, str]) -> None:
    if config["peft_type"] != "LORA":
        raise InvalidInput(f"{path}: peft_type {config['peft_type']!r} is not supported: train with LoraConfig")
    if config.get("bias", "none") != "none":
        raise InvalidInput(
            f"{path}: bias={config['bias']!r} changes biases of the shared layers, which tenants share: train with bias='none'"
        )
    for option, reason in refused.items():
        if config.get(option):
            raise InvalidInput(f"{path}: {option} is not supported, {reason}: train without it")
    if config.get("init_lora_weights", True) not in KEPT_BASE:
        raise InvalidInput(
            f"{path}: init_lora_weights={config['init_lora_weights']!r} subtracts its initial value from the shared "
            "weights: save it with peft's path_initial_model_for_weight_conversion, or train with init_lora_weights=True"
        )


def _by_module(config: Mapping[str, Any], option: str, patterns: str, path: Path) -> Callable[[str], float]:
    """Returns a function from a module to its number: that of the first pattern for its name, or else the adapter's."""
    usual = number(config, option, path)
    given: Any = config.get(patterns) or {}
    if not isinstance(given, dict):
        raise InvalidInput(f"{path}: {patterns} is {given!r}, which is no object of patterns and numbers: save it again")
    own = [(_pattern(key, patterns, path), number(given, key, path)) for key in given]
    return lambda module: next((found for pattern, found in own if pattern.match(module)), usual)


def _pattern(key: str, patterns: str, path: Path) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except re.error as error:
        raise InvalidInput(
            f"{path}: {patterns} has the key {key!r}, which is no regular expression ({error}): correct it, or save it again"
        ) from None


def _head(
    folder: Path,
    config: Mapping[str, Any],
    saved: dict[str, Tensor],
    pooler_changes: Sequence[Part],
    source: Path,
    model: str,
    task: str | None,
) -> ForeignHead:
    path = folder / "adapter_config.json"
    stated = config.get("task_type")
    if stated is not None and stated not in TASK_OF_TYPE:
        raise InvalidInput(f"{path}: task_type {stated!r} is not supported: train with {' or '.join(TASK_OF_TYPE)}")
    base_class = (config.get("auto_mapping") or {}).get("base_model_class")
    if base_class is not None and base_class not in TASK_OF_CLASS:
        raise InvalidInput(f"{path}: base_model_class {base_class!r} is not supported: train with {' or '.join(TASK_OF_CLASS)}")
    pooler_parts = {name.rpartition(".")[2]: saved.pop(name) for name in list(saved) if POOLER.match(name)}
    weight, bias = saved.pop("classifier.weight", None), saved.pop("classifier.bias", None)
    if weight is None and not saved:
        raise InvalidInput(f"{source} has no classifier: train with task_type, or with modules_to_save=['classifier']")
    if weight is None or saved:
        raise InvalidInput(
            f"{source} holds {sorted(saved)[0]!r} whole, which is no part of a BERT classifier: modules_to_save may name "
            "'classifier' and 'pooler'"
        )
    trained = TASK_OF_TYPE.get(stated or "") or TASK_OF_CLASS.get(base_class or "") or task
    labels = labels_by_id(model_config(folder), folder / "config.json")

    def pooler() -> Linear:
        is_whole = pooler_parts.keys() == {"weight", "bias"}
        weight, bias = (pooler_parts["weight"], pooler_parts["bias"]) if is_whole else base_pooler(model, source)
        for change in pooler_changes:
            weight = weight + change["b"] @ change["a"]
        return weight, bias

    return classifier(path, source, (weight, bias), trained, task, labels, pooler)
