"""The one form of an adapter that another library saved, changes by layer and projection and a head, and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from builder.store import resumable
from hplm.adapters.layout import GATED_PROJECTIONS, Layout, adapter_layout
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.original import check_finite

# The projections that each module of a layer computes, by its name in transformers' BERT.
PLACES = {
    "attention.self.query": ("query",),
    "attention.self.key": ("key",),
    "attention.self.value": ("value",),
    "attention.output.dense": ("attention_out",),
    "intermediate.dense": ("ffn_in",),
    "output.dense": ("ffn_out",),
}

# The same in its llama, opt and gpt2.
DECODER_PLACES = {
    "self_attn.q_proj": ("query",),
    "self_attn.k_proj": ("key",),
    "self_attn.v_proj": ("value",),
    "self_attn.o_proj": ("attention_out",),
    "self_attn.out_proj": ("attention_out",),
    "mlp.gate_proj": ("ffn_gate",),
    "mlp.up_proj": ("ffn_in",),
    "mlp.down_proj": ("ffn_out",),
    "fc1": ("ffn_in",),
    "fc2": ("ffn_out",),
    "attn.c_attn": ("query", "key", "value"),
    "attn.c_proj": ("attention_out",),
    "mlp.c_fc": ("ffn_in",),
    "mlp.c_proj": ("ffn_out",),
}

Part = dict[str, Tensor]  # the tensors of one projection: a, b of a LoRA; down, down_bias, up, up_bias of a bottleneck
Changes = dict[int, dict[str, Part]]  # layer -> place -> part


@dataclass(frozen=True)
class ForeignHead:
    source: Path
    task: str
    weights: dict[str, Tensor]
    function: str | None  # between two layers; None: one layer
    labels: list[str] | None  # None: the files do not say


@dataclass(frozen=True)
class Foreign:
    """An adapter that another library saved."""

    source: Path  # the file of its tensors
    library: str
    base: str | None  # the model it was trained on, as its library names it
    kind: str
    function: str  # inside a bottleneck
    changes: Changes  # of the whole model's layers
    leave_out: str  # the library's option that leaves the lower layers unchanged
    head: ForeignHead | None = None  # None: it generates text

    def halves(self, config: BackboneConfig) -> tuple[Changes, Changes]:
        """Returns the changes of the lower and of the upper layers, each half numbered by itself."""
        total = config.lower_layers + config.upper_layers
        beyond = sorted(layer for layer in self.changes if layer >= total)
        if beyond:
            raise InvalidInput(
                f"{self.source} changes layer {beyond[-1]}, but backbone {config.name!r} has {config.lower_layers} lower and "
                f"{config.upper_layers} upper layers: import into a store that keeps all layers of the model, or train again "
                f"with {self.leave_out}"
            )
        _check_shapes(self, config)
        lower = {layer: parts for layer, parts in self.changes.items() if layer < config.lower_layers}
        upper = {layer - config.lower_layers: parts for layer, parts in self.changes.items() if layer >= config.lower_layers}
        return lower, upper


def upper_layout(found: Foreign, upper: Changes, config: BackboneConfig) -> Layout | None:
    """Returns a layout with the largest rank and every changed place; None if no upper layer changes."""
    if not upper:
        return None
    used = {place for parts in upper.values() for place in parts}
    places = tuple(place for place in GATED_PROJECTIONS if place in used)
    rank = max(_rank(part) for parts in upper.values() for part in parts.values())
    return adapter_layout(config, found.kind, rank, places, found.function)


def records(upper: Changes, layout: Layout) -> list[dict[str, Tensor]]:
    """Returns the tensors by layer, padded with zeros to the layout's rank and places. Zeros change no result."""
    layers = []
    for layer in range(layout.layers):
        record = {name: torch.zeros(shape) for name, shape in layout.shapes.items()}
        for place, part in upper.get(layer, {}).items():
            for name, tensor in part.items():
                record[f"{place}/{name}"][tuple(slice(0, size) for size in tensor.shape)] = tensor
        layers.append(record)
    return layers


def storable(tensors: Mapping[str, Tensor], layout: Layout, source: Path) -> dict[str, Tensor]:
    """Converts tensors to the precision of records."""
    rounded = {name: tensor.to(layout.torch_dtype) for name, tensor in tensors.items()}
    for name, tensor in rounded.items():
        if not tensor.isfinite().all():
            raise InvalidInput(f"{source}: a weight of {name} is too large for {layout.dtype}: train again with weight decay")
    return rounded


def _rank(part: Part) -> int:
    return len(part["a"] if "a" in part else part["down"])


def _check_shapes(found: Foreign, config: BackboneConfig) -> None:
    for layer, parts in found.changes.items():
        for place, part in parts.items():
            layout = adapter_layout(config, found.kind, _rank(part), (place,))
            if layout is None:
                raise InvalidInput(f"{found.source} has an adapter of rank 0 in layer {layer}: save the adapter again")
            for name, shape in layout.shapes.items():
                tensor = part.get(name.partition("/")[2])
                if tensor is None:
                    raise InvalidInput(f"{found.source} lacks {name} of layer {layer}: save the adapter again")
                if tuple(tensor.shape) != shape:
                    raise InvalidInput(
                        f"{found.source} has {name} of layer {layer} as {tuple(tensor.shape)}, backbone {config.name!r} needs "
                        f"{shape}: import into a store made from the model that the adapter was trained on"
                    )


def read_json(path: Path) -> dict[str, Any]:
    way_out = "give --from the folder that the library's own save function wrote, or save it again"
    return resumable.read_json(path, InvalidInput, way_out)


def required(config: Mapping[str, Any], option: str, path: Path) -> Any:
    if config.get(option) is None:
        raise InvalidInput(f"{path} lacks {option}: save the adapter again")
    return config[option]


def number(config: Mapping[str, Any], option: str, path: Path) -> float:
    """Returns an option that must be a number."""
    value = required(config, option, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{path}: {option} is {value!r}, which is no number: save the adapter again")
    return value


def tensor_file(folder: Path, names: Sequence[str]) -> Path:
    """Returns the first of these files that exists."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise InvalidInput(f"{folder} has neither {' nor '.join(names)}: give --from the folder with the adapter's weights")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads tensors as fp32. From a pickled `.bin` only tensors are read; no code in it runs."""
    try:
        is_safe = path.suffix == ".safetensors"
        tensors: Any = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the libraries raise anything at a damaged file
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InvalidInput(f"{path} cannot be read ({first_line}): copy or save it again") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise InvalidInput(f"{path} holds something else than tensors with names: save the adapter again")
    found = {str(name): tensor.float() for name, tensor in tensors.items()}
    check_finite(path, found)
    return found
