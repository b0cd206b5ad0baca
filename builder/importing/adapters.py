"""Reads LoRAs that `peft` saved. Adapters of other kinds are merged by `peft`, and imported as checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from builder.importing.foreign import (
    ADAPTER_CONFIG,
    Changes,
    Foreign,
    Tensors,
    accepted,
    grouped,
    number,
    read_json,
    tensor_file,
)
from builder.importing.heads import LATE, MEAN, POOLING, model_config, peft_head
from hplm.errors import MISFITS, InvalidInput
from hplm.model.families import DECODERS, ENCODERS, PartNames
from hplm.model.layer import ATTENTION_OUT, FFN_IN, FFN_OUT, QKV
from hplm.model.original import configuration_of
from hplm.tasks.tasks import find_task

Places = Mapping[str, Sequence[str]]  # the projections that each module of a layer computes, by its name in transformers
PRODUCTS = {QKV: "query key value", ATTENTION_OUT: "attention_out", FFN_IN: "ffn_gate ffn_in", FFN_OUT: "ffn_out"}


def _places(*families: PartNames) -> Places:
    """Returns the projections of the modules of some families."""
    found: dict[str, Sequence[str]] = {}
    for family, at, modules in ((own, *one) for own in families for one in own.layer.items() if one[0] in PRODUCTS):
        own = PRODUCTS[at].split()[0 if at != FFN_IN or family.gated else 1 :]
        found |= {module: own[number :: len(modules)] for number, module in enumerate(modules)}
    return found


DECODER_PLACES = _places(*(family.names for family in DECODERS.values()))
OF_DECODER = r"(?:\w+\.)*(?:layers|h)\.(\d+)\.(.+)"
# The names of tensors: the module and the part. Those without a part are of adapters that cannot be imported.
PEFT_LORA = r"(.+)\.lora_(?:([AB])\.weight|.+)"

MERGE = (
    "only a plain LoRA is taken exactly: merge it with peft's merge_and_unload(), save the model and its tokenizer, and import "
    "that folder, which a tenant learns to match"
)
# The options of a plain LoRA by what they may be; what is empty counts as False.
PLAIN: Mapping[str, Sequence[Any]] = {
    "peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(
        (
            "use_dora", "lora_bias", "layer_replication", "trainable_token_indices", "target_parameters", "use_qalora",
            "alora_invocation_tokens", "arrow_config", "use_bdlora", "kasa_config", "monteclora_config", "megatron_config",
        ),
        (False,),
    ),
}  # fmt: skip
DECODER_TASK = "the store has a decoder: train with CAUSAL_LM"


def read_folder(folder: Path, model: str, task: str | None, is_decoder: bool = False) -> Foreign:
    """Reads a folder that `peft` wrote. `model`: the checkpoint that the store was made from."""
    path = folder / ADAPTER_CONFIG
    stored = read_json(path)
    try:
        if "peft_type" in stored:
            return _peft(folder, stored, model, task, is_decoder)
    except MISFITS as error:
        raise InvalidInput(
            f"a configuration in {folder} has an option of another kind than its library writes ({error}): save the adapter "
            "again"
        ) from error
    raise InvalidInput(
        f"{path} is not of `peft`: save a LoRA with it, or merge the adapter into its model and import that folder"
    )


def _peft(folder: Path, config: Mapping[str, Any], model: str, task: str | None, is_decoder: bool) -> Foreign:
    path = folder / ADAPTER_CONFIG
    way_out = "only a plain LoRA can be imported: train with LoraConfig" if is_decoder else MERGE
    for option, values in {**PLAIN, **({} if is_decoder else {"fan_in_fan_out": (False,)})}.items():
        accepted(config, option, values, way_out, path)
    if is_decoder:
        accepted(config, "task_type", (False, "CAUSAL_LM"), DECODER_TASK, path)
    source = tensor_file(folder, ("adapter_model.safetensors", "adapter_model.bin"))
    modules, saved = grouped(source, PEFT_LORA, {"A", "B"})
    alpha_of, rank_of = (_by_module(config, *names, path) for names in (("lora_alpha", "alpha_pattern"), ("r", "rank_pattern")))
    is_rooted = bool(config.get("use_rslora"))
    scaled = {name: _lora(parts, name, alpha_of(name), rank_of(name), path, is_rooted) for name, parts in modules.items()}
    head, layer, places = None, OF_DECODER, DECODER_PLACES
    if not is_decoder:
        original = configuration_of(model)
        kind, pooling = original.model_type, model_config(folder).get(POOLING, getattr(original, POOLING, None))
        head = peft_head(source, config, saved, scaled, model, task, kind)
        if pooling in (MEAN, LATE) and find_task(head.task).reads_first_token:
            raise InvalidInput(
                f"{source} has a classifier with {POOLING} {pooling!r}, and a tenant reads the first token: {MERGE}"
            )
        names = ENCODERS[kind].names
        layer, places = rf"(?:\w+\.)?{re.escape(names.layers)}\.(\d+)\.(.+)", _places(names)
    elif saved:
        raise InvalidInput(f"{source} holds {min(saved)!r} whole, which tenants share: train without modules_to_save")
    changes = _changes(scaled, layer, places, source)
    base = config.get("base_model_name_or_path")
    return Foreign(source, base, changes, head)


def _by_module(config: Mapping[str, Any], option: str, patterns: str, path: Path) -> Callable[[str], float]:
    """Returns a function from a module to its number: that of the first pattern for its name, or else the adapter's."""
    usual, given = number(config, option, path), config.get(patterns) or {}
    try:
        own = [(re.compile(rf"(.*\.)?({key})$"), number(given, key, path)) for key in given]
    except (AttributeError, re.error) as error:
        raise InvalidInput(
            f"{path}: {patterns} is {given!r}, which is no object of regular expressions and numbers ({error}): correct it, or "
            "save it again"
        ) from None
    return lambda module: next((found for pattern, found in own if pattern.match(module)), usual)


def _lora(parts: Tensors, module: str, alpha: float, stated: float, path: Path, is_rooted: bool = False) -> Tensors:
    """Returns A and B with the scale in B."""
    if (rank := len(parts["A"])) != stated or not rank:
        raise InvalidInput(
            f"{path} has r {stated:g} for {module!r}, whose LoRA has rank {rank}, and its scale depends on it: correct r or "
            "rank_pattern there, or save the adapter again"
        )
    return {"a": parts["A"], "b": parts["B"] * (alpha / (sqrt(rank) if is_rooted else rank))}


def _changes(modules: Mapping[str, Tensors], layer: str, places_of: Places, source: Path) -> Changes:
    """Returns what modules change, by layer and projection. Refuses those that have none."""
    changes: Changes = {}
    for module, parts in modules.items():
        found = re.fullmatch(layer, module)
        if found is None or found[2] not in places_of:
            raise InvalidInput(
                f"{source} changes {module!r}, which is no projection of a layer: train an adapter of {', '.join(places_of)}"
            )
        places, own = places_of[found[2]], changes.setdefault(int(found[1]), {})
        for name, tensor in parts.items():
            tensors = tensor.chunk(len(places)) if name == "b" else [tensor] * len(places)
            own |= {f"{place}/{name}": part for place, part in zip(places, tensors, strict=True)}
    return changes
