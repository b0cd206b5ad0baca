"""A LoRA is cut from what layers learned: all of it if the rank is high enough, otherwise the best of that rank."""

import copy

import pytest
import torch

from builder.training.bodies import PlotBody
from builder.training.cutting import cut, cuttable, hold
from builder.training.model import Diverged
from hplm.adapters.layout import PROJECTIONS, adapter_layout
from hplm.adapters.tiles import Tiles
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import random_backbone
from testing.toy import CONFIG

LENGTHS = [5, 3]


@pytest.fixture
def before():
    return PlotBody(random_backbone(CONFIG)[1], CONFIG.heads).eval().requires_grad_(False)


def changed(body, rank):
    """Returns a copy whose projections differ in this number of directions."""
    body, generator = copy.deepcopy(body), torch.Generator().manual_seed(1)
    for layer in body.upper_layers:
        for name in dict.fromkeys(PROJECTIONS.values()):
            weight = getattr(layer, name).weight
            # For each of the query, the key and the value.
            for part in weight.chunk(3) if name == "qkv" else [weight]:
                left, right = (torch.randn(size, rank, generator=generator) for size in part.shape)
                part.add_(0.05 * left @ right.T)
    return body


def said(body, layout=None, adapter=None):
    x = torch.randn(sum(LENGTHS), CONFIG.hidden, generator=torch.Generator().manual_seed(2))
    every = Tiles(torch.zeros(len(x), dtype=torch.int64).numpy(), x.device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    adapt = None
    if adapter is not None:
        slots = [{name: weight[None] for name, weight in layer.items()} for layer in adapter]
        adapt = [
            lambda at, into, out, weights=weights: layout.adapt(at, into, out, every, weights) for weights in slots
        ]  # fmt: skip
    with torch.inference_mode():
        return body.upper(x, positions, torch.zeros_like(positions), PackedAttention(LENGTHS, CONFIG.heads), adapt)


@pytest.mark.parametrize("rank", [3, CONFIG.hidden + 8])
def test_a_rank_that_is_high_enough_holds_everything(before, rank):
    after = changed(before, rank=3)
    layout = adapter_layout(CONFIG, "lora", rank, tuple(PROJECTIONS))
    adapter, share = cut(before.upper_layers, after.upper_layers, layout)
    assert all(weights[name].shape == shape for weights in adapter for name, shape in layout.shapes.items())
    assert share == pytest.approx(1.0)
    assert torch.allclose(said(before, layout, adapter), said(after), atol=1e-4)
    assert not torch.allclose(said(before), said(after), atol=0.1)


def test_a_lower_rank_holds_the_largest_singular_values(before):
    after = changed(before, rank=6)
    place = {"query": lambda layer: layer.qkv.weight[: CONFIG.hidden], "ffn_out": lambda layer: layer.ffn_out.weight}
    adapter, share = cut(before.upper_layers, after.upper_layers, adapter_layout(CONFIG, "lora", 2, tuple(place)))
    held = total = 0.0
    for old, new, weights in zip(before.upper_layers, after.upper_layers, adapter, strict=True):
        assert weights.keys() == {f"{name}/{side}" for name in place for side in "ab"}
        for name, of in place.items():
            change = of(new) - of(old)
            values = torch.linalg.svdvals(change)
            left = change - weights[f"{name}/b"] @ weights[f"{name}/a"]
            assert left.norm() == pytest.approx(values[2:].norm().item(), rel=1e-3)
            held += float(values[:2].square().sum())
        for at in dict.fromkeys(PROJECTIONS.values()):  # changes of the others are lost
            total += float((getattr(new, at).weight - getattr(old, at).weight).square().sum())
    assert share == pytest.approx(held / total, rel=1e-4) and 0.1 < share < 0.3


@pytest.mark.parametrize("places", [tuple(PROJECTIONS), ("query", "ffn_out")])
def test_layers_keep_what_the_adapter_holds(before, places):
    after, layout = changed(before, rank=6), adapter_layout(CONFIG, "lora", 2, places)
    adapter, share = cut(before.upper_layers, after.upper_layers, layout)
    hold(before.upper_layers, after.upper_layers, adapter, layout)
    assert share < 0.95 and torch.allclose(said(before, layout, adapter), said(after), atol=1e-4)
    assert not torch.allclose(said(before), said(after), atol=0.1)
    again, share = cut(before.upper_layers, after.upper_layers, layout)
    assert share == pytest.approx(1.0)
    assert torch.allclose(said(before, layout, again), said(after), atol=1e-4)


def test_weights_with_nan_are_reported(before):
    after = changed(before, rank=1)
    with torch.no_grad():
        after.upper_layers[0].ffn_in.weight[0, 0] = float("nan")
    with pytest.raises(Diverged, match="--upper-rate"):
        cut(before.upper_layers, after.upper_layers, adapter_layout(CONFIG, "lora", 2, tuple(PROJECTIONS)))


@pytest.mark.parametrize(
    "places, matrices", [(tuple(PROJECTIONS), 4), (("query", "value"), 1), (("key", "attention_out", "ffn_in"), 3)]
)
def test_only_matrices_that_can_be_cut_are_trained(before, places, matrices):
    learned = cuttable(before.upper_layers, adapter_layout(CONFIG, "lora", 2, places))
    assert len(learned) == matrices * CONFIG.upper_layers
    assert all(weight.ndim == 2 for weight in learned)


def test_layers_that_learned_nothing_give_an_empty_lora(before):
    layout = adapter_layout(CONFIG, "lora", 4, tuple(PROJECTIONS))
    adapter, share = cut(before.upper_layers, before.upper_layers, layout)
    assert share == 1.0 and all(not weights[f"{place}/b"].any() for weights in adapter for place in PROJECTIONS)
