"""A LoRA is cut from what layers learned: all of it if the rank is high enough, otherwise the best of that rank."""

import copy

import numpy as np
import pytest
import torch

from builder.learning.loop import Diverged
from builder.training.bodies import PlotBody
from builder.training.cutting import cut, hold
from hplm.adapters.layout import PROJECTIONS, adapter_layout
from hplm.adapters.tiles import Tiles
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import random_backbone
from testing.toy import CONFIG

LENGTHS, ALL = [5, 3], tuple(PROJECTIONS)


@pytest.fixture
def before():
    return PlotBody(random_backbone(CONFIG)[1], CONFIG.heads).eval().requires_grad_(False)


def changed(body, rank):
    """Returns a copy whose projections differ in this number of directions."""
    body, generator = copy.deepcopy(body), torch.Generator().manual_seed(1)
    for layer in body.upper_layers:
        for name in dict.fromkeys(PROJECTIONS.values()):
            weight = getattr(layer, name).weight
            for part in weight.chunk(3) if name == "qkv" else [weight]:  # for each of the query, the key and the value
                left, right = (torch.randn(size, rank, generator=generator) for size in part.shape)
                part.add_(0.05 * left @ right.T)
    return body


def said(body, layout=None, adapter=()):
    x = torch.randn(sum(LENGTHS), CONFIG.hidden, generator=torch.Generator().manual_seed(2))
    every = Tiles(np.zeros(len(x), dtype=np.int64), x.device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    slots = [{name: weight[None] for name, weight in layer.items()} for layer in adapter]
    adapt = [lambda at, into, out, weights=weights: layout.adapt(at, into, out, every, weights) for weights in slots] or None
    with torch.inference_mode():
        return body.upper(x, positions, torch.zeros_like(positions), PackedAttention(LENGTHS, CONFIG.heads), adapt)


@pytest.mark.parametrize(
    "learned, rank, places", [(3, 3, ALL), (3, CONFIG.hidden + 8, ALL), (6, 2, ALL), (6, 2, ("query", "ffn_out"))]
)
def test_what_the_rank_holds_is_kept_and_all_of_it_if_it_is_high_enough(before, learned, rank, places):
    after, layout = changed(before, learned), adapter_layout(CONFIG, "lora", rank, places)
    whole = said(after)
    adapter, share = cut(before.upper_layers, after.upper_layers, layout)
    assert not torch.allclose(said(before), whole, atol=0.1)
    assert (share == pytest.approx(1.0)) == (rank >= learned) == torch.allclose(said(before, layout, adapter), whole, atol=1e-4)
    hold(before.upper_layers, after.upper_layers, adapter, layout)  # what a next epoch starts from
    again, share = cut(before.upper_layers, after.upper_layers, layout)
    assert share == pytest.approx(1.0)
    for one in (adapter, again):
        assert torch.allclose(said(before, layout, one), said(after), atol=1e-4)


def test_a_lower_rank_holds_the_largest_singular_values(before):
    after = changed(before, rank=6)
    place = {"query": lambda layer: layer.qkv.weight[: CONFIG.hidden], "ffn_out": lambda layer: layer.ffn_out.weight}
    adapter, share = cut(before.upper_layers, after.upper_layers, adapter_layout(CONFIG, "lora", 2, tuple(place)))
    held = total = 0.0
    for old, new, weights in zip(before.upper_layers, after.upper_layers, adapter, strict=True):
        for name, of in place.items():
            change = of(new) - of(old)
            values = torch.linalg.svdvals(change)
            left = change - weights[f"{name}/b"] @ weights[f"{name}/a"]
            assert left.norm() == pytest.approx(values[2:].norm().item(), rel=1e-3)
            held += float(values[:2].square().sum())
        for at in dict.fromkeys(PROJECTIONS.values()):  # changes of the others are lost
            total += float((getattr(new, at).weight - getattr(old, at).weight).square().sum())
    assert share == pytest.approx(held / total, rel=1e-4) and 0.1 < share < 0.3


def test_weights_with_nan_are_reported_and_layers_that_learned_nothing_give_an_empty_lora(before):
    layout, after = adapter_layout(CONFIG, "lora", 4, ALL), changed(before, rank=1)
    adapter, share = cut(before.upper_layers, before.upper_layers, layout)
    assert share == 1.0 and all(not weights[f"{place}/b"].any() for weights in adapter for place in PROJECTIONS)
    after.upper_layers[0].ffn_in.weight[0, 0] = float("nan")
    with pytest.raises(Diverged, match="--upper-rate"):
        cut(before.upper_layers, after.upper_layers, layout)
