"""An adapter that another library saved: the changes of each layer and projection, and a head. Reads its files."""

from __future__ import annotations

import re
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

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
LEAVE_OUT = "layers_to_transform=[...]"
WRITTEN = "give --from the folder that the library's own save function wrote, or save it again"

Tensors = dict[str, Tensor]
Changes = dict[int, Tensors]  # of each layer the tensors of a record, such as query/a


@dataclass(frozen=True)
class ForeignHead:
    source: Path
    task: str
    weights: dict[str, Tensor]
    function: str | None  # between two layers; None: one layer
    labels: list[str] | None  # None: the files do not say
    reads_means: bool = False  # it reads the mean of a text's states, where a tenant reads the first token


@dataclass(frozen=True)
class Foreign:
    """An adapter that another library saved."""

    source: Path  # the file of its tensors
    base: str | None  # the model it was trained on, as its library names it
    changes: Changes  # of the whole model's layers
    head: ForeignHead | None = None  # None: it generates text

    def halves(self, config: BackboneConfig) -> tuple[Changes, Changes]:
        """Returns the changes of the lower and of the upper layers, each half numbered by itself."""
        lower = config.lower_layers
        if (last := max(self.changes, default=0)) >= lower + config.upper_layers:
            raise InvalidInput(
                f"{self.source} changes layer {last}, but backbone {config.name!r} has {lower} lower and {config.upper_layers} "
                f"upper layers: import into a store that keeps all layers of the model, or train again with {LEAVE_OUT}"
            )
        for layer, own in self.changes.items():
            for place, rank in _ranks(own).items():
                if (layout := adapter_layout(config, "lora", rank, (place,))) is None:
                    raise InvalidInput(f"{self.source} has an adapter of rank 0 in layer {layer}: save the adapter again")
                check_shapes(own, layout, config, self.source, f"layer {layer}")
        below = {layer: own for layer, own in self.changes.items() if layer < lower}
        return below, {layer - lower: own for layer, own in self.changes.items() if layer >= lower}


def check_shapes(tensors: Mapping[str, Tensor], layout: Layout, config: BackboneConfig, source: Path, where: str) -> None:
    for name, shape in layout.shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise InvalidInput(
                f"{source} has {name} of {where} as {tuple(tensors[name].shape)}, backbone {config.name!r} needs {shape}: "
                "import into a store made from the model that it was trained on"
            )


def upper_adapter(found: Foreign, upper: Changes, config: BackboneConfig) -> tuple[Layout, list[Tensors]] | None:
    """Returns a layout with the largest rank and every changed place, and its tensors by layer. None: no upper layer changes.

    Smaller ranks and places that are not changed are padded with zeros, which change no result.
    """
    ranks = [(place, rank) for own in upper.values() for place, rank in _ranks(own).items()]
    places = tuple(place for place in GATED_PROJECTIONS if place in dict(ranks))
    layout = adapter_layout(config, "lora", max((rank for _, rank in ranks), default=0), places)
    if layout is None:
        return None
    layers = [{name: torch.zeros(shape) for name, shape in layout.shapes.items()} for _ in range(layout.layers)]
    for layer, own in upper.items():
        for name, tensor in own.items():
            layers[layer][name][tuple(map(slice, tensor.shape))] = tensor
    return layout, [storable(layer, layout, found.source) for layer in layers]


def _ranks(own: Tensors) -> dict[str, int]:
    return {name.partition("/")[0]: len(tensor) for name, tensor in own.items() if name.endswith("/a")}


def storable(tensors: Mapping[str, Tensor], layout: Layout, source: Path) -> dict[str, Tensor]:
    """Converts tensors to the precision of records."""
    rounded = {name: tensor.to(layout.torch_dtype) for name, tensor in tensors.items()}
    for name, tensor in rounded.items():
        if not tensor.isfinite().all():
            raise InvalidInput(f"{source}: a weight of {name} is too large for {layout.dtype}: train again with weight decay")
    return rounded


def read_json(path: Path, way_out: str = WRITTEN) -> dict[str, Any]:
    return resumable.read_json(path, InvalidInput, way_out)


def accepted(config: Mapping[str, Any], option: str, values: Sequence[Any], reason: str, path: Path) -> Any:
    """Returns an option that must have one of these values. False stands for every empty one.

    An option that is missing has the first value, and is refused if that is None.
    """
    value = config.get(option, values[0])
    if (value or False) not in values:
        raise InvalidInput(f"{path}: {option}={value!r} is not supported, {reason}")
    return value


def number(config: Mapping[str, Any], option: str, path: Path) -> float:
    """Returns an option that must be a number."""
    value = config.get(option)
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
        if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise TypeError("it holds something else than tensors with names")
    except Exception as error:  # the libraries raise anything at a damaged file
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InvalidInput(f"{path} cannot be read ({first_line}): copy or save it again") from error
    found = {str(name): tensor.float() for name, tensor in tensors.items()}
    check_finite(path, found)
    return found


def grouped(source: Path, pattern: str, needed: set[str]) -> tuple[dict[str, Tensors], Tensors]:
    """Reads tensors by module and part, which the pattern finds in their names, and those with other names.

    A name without a part belongs to another kind of adapter.
    """
    groups: dict[str, Tensors] = {}
    others: Tensors = {}
    for stored, tensor in read_tensors(source).items():
        name = stored.removeprefix("base_model.model.")
        if (found := re.fullmatch(pattern, name)) is None:
            others[name] = tensor
        elif found[2] is None:
            raise InvalidInput(f"{source} has {stored!r}, which no plain adapter has: train one without it")
        else:
            groups.setdefault(found[1], {})[found[2]] = tensor
    for module, parts in groups.items():
        if missing := needed - parts.keys():
            raise InvalidInput(f"{source} lacks {', '.join(sorted(missing))} of {module!r}: save it again")
    return groups, others
