"""Cuts the change of trained upper layers to a LoRA: `before` are the layers as they were, `after` those that have learned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from builder.console import passing_bar
from builder.learning.loop import Diverged
from builder.training.model import Weights
from hplm.adapters.layout import Layout
from hplm.model.layer import Layers


def cuttable(layers: Layers, layout: Layout) -> list[nn.Parameter]:
    """Returns the weights that may learn if the change is cut to a LoRA: no biases and no norms, which a LoRA cannot hold."""
    return [getattr(layer, at).weight for layer in layers for at in _products(layout) if at in layout.maps]


@torch.no_grad()
def hold(before: Layers, after: Layers, adapter: Sequence[Weights], layout: Layout) -> None:
    """Sets `after` to `before` plus the part of the change that the adapter holds."""
    for old, new, weights in zip(before, after, adapter, strict=True):
        for at, places in _products(layout).items():
            weight = getattr(old, at).weight.clone()
            for place in places:
                if f"{place}/a" in weights:
                    weight[layout.outputs(place)] += weights[f"{place}/b"] @ weights[f"{place}/a"]
            getattr(new, at).weight.copy_(weight)


@torch.no_grad()
def cut(before: Layers, after: Layers, layout: Layout) -> tuple[list[Weights], float]:
    """Returns the LoRA nearest to the change, layer by layer: the largest singular values of each projection's change.

    Also returns the share of the squared change that it holds.
    """
    held = total = 0.0
    adapter: list[Weights] = [{} for _ in before]
    layers = zip(before, after, adapter, strict=True)
    products = [(*layer, *product) for layer in layers for product in _products(layout).items()]
    for old, new, weights, at, places in passing_bar(products, "cutting the change to a LoRA", unit="matrix"):
        change = getattr(new, at).weight - getattr(old, at).weight
        if not change.isfinite().all():
            raise Diverged("training diverged, a weight is NaN: use a smaller --upper-rate")
        for place in places:
            part = change[layout.outputs(place)]
            if place not in layout.places:  # lost: it was trained in one matrix with another projection
                total += float(part.square().sum())
                continue
            left, values, right = torch.linalg.svd(part, full_matrices=False)
            root = values[: layout.size].sqrt()  # split between both matrices, so that each fits in 16 bits
            spare = layout.size - len(root)  # the layout's rank is above the matrix's own
            weights[f"{place}/a"] = F.pad(root[:, None] * right[: layout.size], (0, 0, 0, spare))
            weights[f"{place}/b"] = F.pad(left[:, : layout.size] * root, (0, spare))
            held, total = held + float(root.pow(4).sum()), total + float(values.square().sum())
    return adapter, held / total if total else 1.0


def _products(layout: Layout) -> dict[str, list[str]]:
    """Returns the products of a layer, each with the projections that it computes."""
    products: dict[str, list[str]] = {}
    for place, at in layout.projections.items():
        products.setdefault(at, []).append(place)
    return products
