"""What upper layers have learned, cut to what a LoRA holds of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from builder.training.model import Weights
from hplm.adapters.layout import PROJECTIONS, Layout
from hplm.model.layer import Layer


@torch.no_grad()
def cut(before: Sequence[Layer], after: Sequence[Layer], layout: Layout) -> tuple[list[Weights], float]:
    """The LoRA nearest to the change, layer by layer: the largest singular values of every projection's that it works on.

    And the share of their squared change that it holds. Biases and norms stay as they were.
    """
    held = total = 0.0
    adapter: list[Weights] = []
    for old, new in zip(before, after, strict=True):
        weights: Weights = {}
        for at in filter(layout.touches, dict.fromkeys(PROJECTIONS.values())):
            places = [place for place, own in PROJECTIONS.items() if own == at]
            change = getattr(new, at).weight - getattr(old, at).weight
            for place, part in zip(places, change.chunk(len(places)), strict=True):
                if place in layout.places:
                    left, values, right = torch.linalg.svd(part, full_matrices=False)
                    root = values[: layout.size].sqrt()  # a half on either side: both stay within what 16 bits hold
                    spare = layout.size - len(root)  # of a rank above the matrix's own
                    weights[f"{place}/a"] = F.pad(root[:, None] * right[: layout.size], (0, 0, 0, spare))
                    weights[f"{place}/b"] = F.pad(left[:, : layout.size] * root, (0, spare))
                    held, total = held + float(root.pow(4).sum()), total + float(values.square().sum())
        adapter.append(weights)
    return adapter, held / total if total else 1.0
