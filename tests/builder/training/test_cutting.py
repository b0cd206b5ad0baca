"""A LoRA is cut from what layers learned: the largest singular values of its rank, which are all if the rank is high enough."""

import copy
from dataclasses import replace

import pytest
import torch

from builder.learning.bodies import PlotBody
from builder.learning.loop import Diverged
from builder.training.cutting import cut, hold
from builder.training.finetuning import TrainingOptions, adapter_of
from hplm.adapters.layout import PROJECTIONS, adapter_layout
from testing.random_store import random_backbone
from testing.toy import CONFIG

ALL = tuple(PROJECTIONS)
PARTS = ("query", "key", "value")  # of one weight


@pytest.fixture
def before():
    return PlotBody(random_backbone(CONFIG)[1]).eval().requires_grad_(False)


def projections(body):
    """Returns the weights of all places, in each layer."""
    for layer in body.upper_layers:
        weights = {place: getattr(layer, name).weight for place, name in PROJECTIONS.items()}
        yield weights | dict(zip(PARTS, weights["query"].chunk(3), strict=True))


def changed(body, rank):
    """Returns a copy whose projections differ in this number of directions."""
    body, generator = copy.deepcopy(body), torch.Generator().manual_seed(1)
    for layer in projections(body):
        for part in layer.values():
            left, right = (torch.randn(size, rank, generator=generator) for size in part.shape)
            part.add_(0.05 * left @ right.T)
    return body


@pytest.mark.parametrize(
    "learned, rank, places", [(3, 3, ALL), (3, CONFIG.hidden + 8, ALL), (6, 2, ALL), (6, 2, ("query", "ffn_out"))]
)
def test_the_rank_holds_the_largest_singular_values_and_layers_go_on_from_them(before, learned, rank, places):
    after, layout = changed(before, learned), adapter_layout(CONFIG, "lora", rank, places)
    held = total = 0.0
    adapter, share = cut(before.upper_layers, after.upper_layers, layout)
    products = [{place: weights[f"{place}/b"] @ weights[f"{place}/a"] for place in places} for weights in adapter]
    for old, new, product in zip(projections(before), projections(after), products, strict=True):
        for place in ALL:  # changes of other places are lost
            values = torch.linalg.svdvals(new[place] - old[place])
            total += float(values.square().sum())
            if place in places:
                held += float(values[:rank].square().sum())
                left = (new[place] - old[place] - product[place]).norm()
                assert left == pytest.approx(values[rank:].norm().item(), rel=1e-3, abs=1e-4), place
    assert share == pytest.approx(held / total, rel=1e-4) and (share > 0.999) == (rank >= learned)
    hold(before.upper_layers, after.upper_layers, adapter, layout)  # what a next epoch starts from
    for old, new, product in zip(projections(before), projections(after), products, strict=True):
        assert all(torch.allclose(new[place] - old[place], product.get(place, torch.zeros(1)), atol=1e-5) for place in ALL)
    assert cut(before.upper_layers, after.upper_layers, layout)[1] == pytest.approx(1.0)


def test_weights_with_nan_are_reported_and_layers_that_learned_nothing_give_an_empty_lora(before):
    layout, after = adapter_layout(CONFIG, "lora", 4, ALL), changed(before, rank=1)
    adapter, share = cut(before.upper_layers, before.upper_layers, layout)
    assert share == 1.0 and all(not weights[f"{place}/b"].any() for weights in adapter for place in ALL)
    after.upper_layers[0].ffn_in.weight[0, 0] = float("nan")
    with pytest.raises(Diverged, match="--upper-rate"):
        cut(before.upper_layers, after.upper_layers, layout)


def test_layers_with_a_gate_keep_what_it_learned():
    config = replace(CONFIG, gated=True)
    before = PlotBody(random_backbone(config)[1]).eval().requires_grad_(False)
    after = copy.deepcopy(before)
    for layer in after.upper_layers:
        gate = layer.ffn_in.weight[: config.intermediate]
        gate.add_(0.05 * torch.ones(len(gate), 1) @ torch.ones(1, config.hidden))
    layout = adapter_of(config, TrainingOptions(adapter="lora", rank=4, body_rate=1e-4))
    adapter, share = cut(before.upper_layers, after.upper_layers, layout)
    assert share == pytest.approx(1.0)
    for old, new, weights in zip(before.upper_layers, after.upper_layers, adapter, strict=True):
        change = (new.ffn_in.weight - old.ffn_in.weight)[: config.intermediate]
        assert torch.allclose(weights["ffn_gate/b"] @ weights["ffn_gate/a"], change, atol=1e-5)
