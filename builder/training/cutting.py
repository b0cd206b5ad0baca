"""What upper layers have learned, cut to what a LoRA holds of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from builder.training.model import Diverged, Weights
from hplm.adapters.layout import PROJECTIONS, Layout
from hplm.model.layer import Layer

PLACES = {at: [place for place, own in PROJECTIONS.items() if own == at] for at in PROJECTIONS.values()}


def cuttable(layers: Sequence[Layer], layout: Layout) -> list[nn.Parameter]:
    """What may change if the change is to be cut: biases and norms are not among it, since a LoRA could not hold theirs."""
    return [getattr(layer, at).weight for layer in layers for at in PLACES if layout.touches(at)]


@torch.no_grad()
def hold(before: Sequence[Layer], after: Sequence[Layer], adapter: Sequence[Weights]) -> None:
    """Of what was learned, `after` keeps what the adapter holds."""
    for old, new, weights in zip(before, after, adapter, strict=True):
        for at, places in PLACES.items():
            weight = getattr(old, at).weight.clone()
            for place, part in zip(places, weight.chunk(len(places)), strict=True):
                if f"{place}/a" in weights:
                    part += weights[f"{place}/b"] @ weights[f"{place}/a"]
            getattr(new, at).weight.copy_(weight)


@torch.no_grad()
def cut(before: Sequence[Layer], after: Sequence[Layer], layout: Layout) -> tuple[list[Weights], float]:
    """The LoRA nearest to the change, layer by layer: the largest singular values of every projection's that it works on.

    And the share of all squared change that it holds.
    """
    held = total = 0.0
    adapter: list[Weights] = []
    for old, new in zip(before, after, strict=True):
        weights: Weights = {}
        for at, places in PLACES.items():
            change = getattr(new, at).weight - getattr(old, at).weight
            if not change.isfinite().all():
                raise Diverged("training diverged: a weight is not a number any more; use a smaller --upper-rate")
            for place, part in zip(places, change.chunk(len(places)), strict=True):
                if place not in layout.places:  # lost: it learned in one matrix with another's
                    total += float(part.square().sum())
                    continue
                left, values, right = torch.linalg.svd(part, full_matrices=False)
                root = values[: layout.size].sqrt()  # a half on either side: both stay within what 16 bits hold
                spare = layout.size - len(root)  # of a rank above the matrix's own
                weights[f"{place}/a"] = F.pad(root[:, None] * right[: layout.size], (0, 0, 0, spare))
                weights[f"{place}/b"] = F.pad(left[:, : layout.size] * root, (0, spare))
                held, total = held + float(root.pow(4).sum()), total + float(values.square().sum())
        adapter.append(weights)
    return adapter, held / total if total else 1.0
