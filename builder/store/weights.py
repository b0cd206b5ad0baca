"""Files with the adapter and the head of a tenant."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from hplm.model.weights import load_weights, save_weights

ADAPTER, HEAD = "adapter.safetensors", "head.safetensors"
Weights = tuple[list[dict[str, Tensor]] | None, dict[str, Tensor]]  # of the adapter, layer by layer, and the head


def read_adapter(folder: Path, layers: int) -> list[dict[str, Tensor]]:
    """Returns the tensors of each layer."""
    adapter: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    for name, tensor in load_weights(folder / ADAPTER).items():
        layer, _, part = name.partition(".")
        adapter[int(layer)][part] = tensor
    return adapter


def write_weights(folder: Path, adapter: list[dict[str, Tensor]] | None, head: dict[str, Tensor]) -> None:
    """Writes adapter and head, named and shaped as their layouts say. `head`: empty if there is none."""
    if adapter is not None:
        flat = {f"{i}.{name}": tensor for i, layer in enumerate(adapter) for name, tensor in layer.items()}
        save_weights(flat, folder / ADAPTER)
    if head:
        save_weights(head, folder / HEAD)
