"""Reads adapters: LoRAs that `peft` saved, and LoRAs and bottlenecks that AdapterHub's `adapters` saved.

The options of a bottleneck say what it reads and where it adds. With `original_ln_before` off and `original_ln_after` on
it reads a projection's output y and adds scaling . up(f(down(y))) to it; BERT's own sum and norm follow, as in ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from builder.importing.foreign import ADAPTER_CONFIG, Changes, Foreign, Parts, accepted, grouped, number, read_json, tensor_file
from builder.importing.heads import hub_head, known_function, peft_head
from hplm.errors import MISFITS, InvalidInput
from hplm.model.families import DECODERS, ENCODERS, Names
from hplm.model.layer import ATTENTION_OUT, FFN_IN, FFN_OUT, QKV

Places = Mapping[str, Sequence[str]]  # the projections that each module of a layer computes, by its name in transformers
PRODUCTS = {QKV: "query key value", ATTENTION_OUT: "attention_out", FFN_IN: "ffn_gate ffn_in", FFN_OUT: "ffn_out"}


def _places(*families: Names) -> Places:
    """Returns the projections of the modules of some families."""
    found: dict[str, Sequence[str]] = {}
    for at, modules in (one for names in families for one in names.layer.items() if one[0] in PRODUCTS):
        own = PRODUCTS[at].split()[-len(modules) if at == FFN_IN else 0 :]  # few families have a gate
        found |= {module: own[number :: len(modules)] for number, module in enumerate(modules)}
    return found


PLACES, DECODER_PLACES = _places(ENCODERS["bert"].names), _places(*(family.names for family in DECODERS.values()))
BOTTLENECK_PLACES: Places = {"attention.output": ["attention_out"], "output": ["ffn_out"]}
OF_BERT, OF_DECODER = r"(?:bert\.)?encoder\.layer\.(\d+)\.(.+)", r"(?:\w+\.)*(?:layers|h)\.(\d+)\.(.+)"
# The names of tensors: the module and the part. Those without a part are of adapters that cannot be imported.
PEFT_LORA = r"(.+)\.lora_(?:([AB])\.weight|.+)"
HUB_LORA = r"(.+)\.loras\..+\.lora_([AB])|.+"
BOTTLENECK = r"(.+)\.adapters\..+\.(adapter_(?:down\.0|up)\.(?:weight|bias)|scaling)|.+"

Options = Mapping[str, tuple[Sequence[Any], str]]  # the values of an option that can be imported, and why others cannot


def _off(way_out: str, **reasons: str) -> Options:
    """Returns options that must be off."""
    return {option: ((False,), f"{reason}: {way_out}") for option, reason in reasons.items()}


PEFT_OPTIONS: Options = {
    "peft_type": (("LORA",), "train with LoraConfig"),
    "bias": (("none",), "it changes biases of the shared layers, which tenants share: train with bias='none'"),
    "init_lora_weights": (
        (True, False, "gaussian", "eva", "orthogonal"),
        "it subtracts its initial value from the shared weights: save it with peft's path_initial_model_for_weight_conversion, "
        "or train with init_lora_weights=True",
    ),
    **_off("train without it",
        use_dora="DoRA rescales the shared weights", lora_bias="its B has a bias", layer_replication="it repeats layers",
        trainable_token_indices="it changes word embeddings", target_parameters="it changes bare parameters",
        use_qalora="it pools its input", alora_invocation_tokens="it works on some tokens only",
        arrow_config="it mixes several adapters", use_bdlora="its matrices are block-diagonal",
        kasa_config="it scales each rank", monteclora_config="it draws random weights",
        megatron_config="it is split over devices"),
}  # fmt: skip
ENCODER_OPTIONS = _off("train without it", fan_in_fan_out="it is made for transposed weights, which BERT does not have")
DECODER_OPTIONS: Options = {"task_type": ((False, "CAUSAL_LM"), "the store has a decoder: train with CAUSAL_LM")}
BOTTLENECK_OPTIONS: Options = {
    "original_ln_after": ((True,), "BERT's own norm is left out: train double_seq_bn"),
    **_off("train double_seq_bn, or a BnConfig with original_ln_before=False",
        original_ln_before="the adapter reads the sum after BERT's norm, not a projection's output (seq_bn, pfeiffer)",
        ln_before="the adapter has a norm of its own", ln_after="the adapter has a norm of its own",
        is_parallel="the adapter reads what goes into the layer's half, not what comes out (par_bn)",
        phm_layer="its matrices are sums of Kronecker products (compacter)",
        use_gating="the adapter's share depends on the text", inv_adapter="it changes word embeddings",
        cross_adapter="BERT has no cross attention"),
}  # fmt: skip
LORA_OPTIONS: Options = {
    "composition_mode": (("add",), "it scales instead of adding (ia3): train a plain LoRAConfig"),
    **_off("train a plain LoRAConfig", use_gating="the adapter's share depends on the text",
        use_dora="DoRA rescales the shared weights", vera_d="VeRA's matrices are shared and random"),
}  # fmt: skip


def read_folder(folder: Path, model: str, task: str | None, is_decoder: bool = False) -> Foreign:
    """Reads a folder that `peft` or `adapters` wrote. `model`: the checkpoint that the store was made from."""
    path = folder / ADAPTER_CONFIG
    stored = read_json(path)
    try:
        if "peft_type" in stored:
            return _peft(folder, stored, model, task, is_decoder)
        if {"config", "model_type"} <= stored.keys() and not is_decoder:
            return _adapterhub(folder, stored, model, task)
    except MISFITS as error:
        raise InvalidInput(
            f"a configuration in {folder} has an option of another kind than its library writes ({error}): save the adapter "
            "again"
        ) from error
    libraries = "`peft`, the only library whose adapters of decoders can be imported" if is_decoder else "`peft` or `adapters`"
    raise InvalidInput(f"{path} is not of {libraries}: save the adapter with it")


def _peft(folder: Path, config: Mapping[str, Any], model: str, task: str | None, is_decoder: bool) -> Foreign:
    path = folder / ADAPTER_CONFIG
    _check(config, {**PEFT_OPTIONS, **(DECODER_OPTIONS if is_decoder else ENCODER_OPTIONS)}, path)
    source = tensor_file(folder, ("adapter_model.safetensors", "adapter_model.bin"))
    modules, saved = grouped(source, PEFT_LORA, {"A", "B"})
    alpha_of, rank_of = (_by_module(config, *names, path) for names in (("lora_alpha", "alpha_pattern"), ("r", "rank_pattern")))
    is_rooted = bool(config.get("use_rslora"))
    scaled = {name: _lora(parts, name, alpha_of(name), rank_of(name), path, is_rooted) for name, parts in modules.items()}
    head = None
    if not is_decoder:
        head = peft_head(source, config, saved, scaled, model, task)
    elif saved:
        raise InvalidInput(f"{source} holds {min(saved)!r} whole, which tenants share: train without modules_to_save")
    changes = _changes(scaled, *((OF_DECODER, DECODER_PLACES) if is_decoder else (OF_BERT, PLACES)), source)
    base = config.get("base_model_name_or_path")
    return Foreign(source, "peft LoRA", base, "lora", "relu", changes, "layers_to_transform=[...]", head)


def _adapterhub(folder: Path, stored: Mapping[str, Any], model: str, task: str | None) -> Foreign:
    path, config = folder / ADAPTER_CONFIG, stored["config"]
    if not isinstance(config, dict):
        raise InvalidInput(f"{path} only names its configuration ({config!r}): load it and save it with `adapters` 1.x")
    accepted(stored, "model_type", ["bert"], "only adapters of BERT models can be imported", path)
    source = tensor_file(folder, ("adapter.safetensors", "pytorch_adapter.bin"))
    kinds = [False, "bottleneck", "lora"]
    kind = accepted(config, "architecture", kinds, "train a double_seq_bn or a LoRA", path) or "bottleneck"
    _check(config, LORA_OPTIONS if kind == "lora" else BOTTLENECK_OPTIONS, path)
    if kind == "lora":
        alpha, rank, function, places = number(config, "alpha", path), number(config, "r", path), "relu", PLACES
        modules, _ = grouped(source, HUB_LORA, {"A", "B"})
        parts = {name: _lora(own, name, alpha, rank, path) for name, own in modules.items()}
    else:
        function, places = known_function(config, "non_linearity", path), BOTTLENECK_PLACES
        needed = {f"adapter_{part}" for part in ("down.0.weight", "down.0.bias", "up.weight", "up.bias")}
        modules, _ = grouped(source, BOTTLENECK, needed)
        parts = {name: _bottleneck(own, config.get("scaling", 1.0), source) for name, own in modules.items()}
    changes = _changes(parts, OF_BERT, places, source)
    library, base, head = f"adapters {kind}", stored.get("model_name"), hub_head(folder, model, task)
    return Foreign(source, library, base, kind, function, changes, "leave_out=[...]", head)


def _check(config: Mapping[str, Any], options: Options, path: Path) -> None:
    for option, (values, reason) in options.items():
        accepted(config, option, values, reason, path)


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


def _lora(parts: Parts, module: str, alpha: float, stated: float, path: Path, is_rooted: bool = False) -> Parts:
    """Returns A and B with the scale in B."""
    if (rank := len(parts["A"])) != stated or not rank:
        raise InvalidInput(
            f"{path} has r {stated:g} for {module!r}, whose LoRA has rank {rank}, and its scale depends on it: correct r or "
            "rank_pattern there, or save the adapter again"
        )
    return {"a": parts["A"], "b": parts["B"] * (alpha / (sqrt(rank) if is_rooted else rank))}


def _bottleneck(parts: Parts, fixed: float | str, source: Path) -> Parts:
    """Folds the scale into the output weights: one number, fixed or learned, or one a channel."""
    down, bias, up, up_bias = (parts[f"adapter_{name}"] for name in ("down.0.weight", "down.0.bias", "up.weight", "up.bias"))
    if "scaling" not in parts and isinstance(fixed, str):
        raise InvalidInput(f"{source} lacks the scaling that its configuration ({fixed!r}) says was learned: save it again")
    scale = parts["scaling"] if "scaling" in parts else down.new_tensor([fixed])
    return {"down": down, "down_bias": bias, "up": up * scale.unsqueeze(1), "up_bias": up_bias * scale}


def _changes(modules: Mapping[str, Parts], layer: str, places_of: Places, source: Path) -> Changes:
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
