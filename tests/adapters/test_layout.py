"""Names and keys of layouts, refused ones, and weights that arrive late. What layouts compute: `answers/test_reference.py`."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from hplm.adapters.groups import Tiles
from hplm.adapters.layout import Layout, adapter_layout, head_layout
from hplm.adapters.layout_rows import LayoutRows, adapted, adapted_last
from hplm.adapters.slots import REACHED
from hplm.engine.engine import read
from hplm.errors import Broken, InvalidInput
from hplm.model.layer import KEY_VALUE, QKV, QUERY
from testing.toy import CONFIG
from tests.support.message import mentioning

SLOTS = [0, 1, 0, 3, 3, 3, 2, 3, 1, 0]


class Late:
    """The event of weights that are NaN until somebody waits for it."""

    def __init__(self, weights):
        self._weights, self._kept = weights, {name: tensor.clone() for name, tensor in weights.items()}
        for tensor in weights.values():
            tensor.fill_(torch.nan)

    def wait(self):
        for name, tensor in self._weights.items():
            tensor.copy_(self._kept[name])


def test_weights_of_a_layer_are_used_when_they_have_arrived():
    adapter, head = Layout("lora", 2, 8, 2, ("query",), 12), head_layout(CONFIG, 5, "tanh")
    for layout, width in ((adapter, 8), (head, CONFIG.hidden)):
        x = torch.randn(len(SLOTS), width)
        layers = [{name: torch.randn(4, *shape) for name, shape in layout.shapes.items()} for _ in range(layout.layers)]
        groups = Tiles(np.array(SLOTS), np.ones(len(SLOTS), np.int64), torch.device("cpu"))
        part = LayoutRows(layout, groups, layers, [Late(layer) for layer in layers], None)
        for layer in range(layout.layers):
            found = adapted([part], layer, QKV, x, torch.zeros(len(x), 24)) if layout is adapter else read(x, [part])
            assert found.isfinite().all()


@pytest.mark.parametrize("kind", ["lora", "bottleneck"])
@pytest.mark.parametrize("places", [("query",), ("key", "ffn_in"), ("value", "query"), ("query", "key", "value")])
def test_queries_that_are_computed_alone_are_adapted_alone(kind, places):
    """Queries are wider than keys and values."""
    layout = Layout(kind, 2, 8, 1, places, 12, query_width=12, key_width=4)
    layers = [{name: torch.randn(4, *shape) for name, shape in layout.shapes.items()}]
    x, after, rows = torch.randn(len(SLOTS), 8), torch.randn(len(SLOTS), 20), torch.tensor([0, 3, 8])

    def parts(slots):
        groups = Tiles(np.array(slots), np.ones(len(slots), np.int64), torch.device("cpu"))
        return [LayoutRows(layout, groups, layers, [REACHED], None)]

    whole = adapted(parts(SLOTS), 0, QKV, x, after.clone())
    last = partial(adapted_last, parts(SLOTS), parts([SLOTS[row] for row in rows]), 0)
    assert torch.allclose(last(QUERY, x[rows], after[rows, :12]), whole[rows, :12], atol=1e-5)
    assert torch.allclose(last(KEY_VALUE, x, after[:, 12:].clone()), whole[:, 12:], atol=1e-5)
    assert not torch.equal(whole, after)


def test_different_layouts_have_different_names_and_keys_and_are_known_by_their_keys():
    one = Layout("bottleneck", 8, 8, 2, ("attention_out",))
    lora = Layout("lora", 8, 8, 2, ("value",))
    changes = {"layers": 1, "places": ("ffn_out",), "function": "gelu", "dtype": "bf16", "size": 4}
    layouts = [one, lora, replace(lora, places=("query", "value")), Layout("head", 16, 8, 1), Layout("head2", 16, 8, 1)]
    layouts += [replace(one, **{name: value}) for name, value in changes.items()]
    assert len({layout.name for layout in layouts}) == len({layout.key for layout in layouts}) == len(layouts)
    assert [Layout.of(layout.key) for layout in layouts] == layouts
    assert layouts[0].name == "bottleneck-8x2" and lora.name == "lora-8x2-value"
    for wrong in ("", "lora", layouts[0].key + ",1", layouts[0].key.replace("8", "x")):
        with pytest.raises(Broken, match="no layout"):
            Layout.of(wrong)


@pytest.mark.parametrize(
    "wrong, named",
    [
        (lambda: Layout("prefix", 8, 8, 2), ["'prefix'", "bottleneck", "lora", "head", "head2"]),
        (lambda: Layout("lora", 8, 8, 2, ("pooler",)), ["'pooler'"]),
        (lambda: Layout("lora", 8, 8, 2, ("query", "query")), ["query, query"]),
        (lambda: Layout("bottleneck", 8, 8, 2, ("attention_out",), function="swish"), ["'swish'"]),
        (lambda: Layout("head", 8, 8, 1, dtype="int4"), ["'int4'", "fp16", "bf16"]),
        (lambda: adapter_layout(CONFIG, "head", 8), ["'head'", "bottleneck", "lora"]),
    ],
)
def test_unknown_kinds_places_functions_and_dtypes_are_refused(wrong, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        wrong()
