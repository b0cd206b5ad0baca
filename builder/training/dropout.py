"""BERT's dropout: parts of hidden states are left out in training, so that the model relies on none of them.

Not on attention's weights: attention over packed texts does not keep them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from builder.training.bodies import Body, PlotBody, WholeBody
from hplm.model.layer import Layer


@contextmanager
def dropout(body: Body, share: float, seed: Sequence[int]) -> Iterator[None]:
    """Drops this share of the body's hidden states, chosen by the seed, while it is entered.

    Dropped are the input of the first layer, what the two halves of a layer add to it, and what the head reads.
    """
    chance: dict[torch.device, torch.Generator] = {}

    def drop(module: nn.Module, before: object, after: Tensor) -> Tensor:
        if after.device not in chance:
            number = int(np.random.SeedSequence(seed).generate_state(1)[0])
            chance[after.device] = torch.Generator(after.device).manual_seed(number)
        kept = torch.empty_like(after).bernoulli_(1 - share, generator=chance[after.device])
        return (after * kept).div_(1 - share)

    dropped = [module.register_forward_hook(drop) for module in _parts(body)] if share else []
    try:
        yield
    finally:
        for one in dropped:
            one.remove()


def _parts(body: Body) -> Iterator[nn.Module]:
    """Yields the modules whose outputs are dropped. A body that remembers its results computes them without."""
    if isinstance(body, PlotBody | WholeBody):
        yield body.upper.norm if isinstance(body, PlotBody) else body.norm
        for layer in body.modules():
            if isinstance(layer, Layer):
                yield from (layer.attention_out, layer.ffn_out)
    yield body
