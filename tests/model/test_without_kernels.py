"""Without a compiled kernel, or with one of another version, torch and numpy compute, and the log says so.

The kernels' own tests compare what both compute.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from hplm.adapters import kernel as of_adapters
from hplm.adapters.layout import Layout
from hplm.adapters.tiles import Tiles
from hplm.model import kernel as of_layers
from hplm.model.attention import PackedAttention
from hplm.model.eightbit import EightBit
from hplm.model.windows import Window
from hplm.plot import kernel as of_tables
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.gathering import Gatherer
from hplm.plot.keys import KeySpace
from tests.plot.tables import make_table

CPU = torch.device("cpu")


def of_a_table(folder):
    space = KeySpace(5, Window(3))
    tables = [make_table(folder, "root", None, space, [(1, 2, 3), *((0, i, 0) for i in range(1, 6))])]
    forest, lengths = Forest([folder], assign_addresses(tables)), np.array([2, 3])
    hits = forest.chain("root", 1).lookup(np.arange(5), lengths)
    return Gatherer(CPU, torch.float32).sums(forest, hits.addresses, lengths)


def of_an_adapter(folder):
    layout = Layout("bottleneck", 32, 64, 1, ("attention_out",))  # a new one: a layout remembers which kernel takes it
    groups = layout.group(np.zeros(3, dtype=np.int64), CPU, torch.float32)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(1, *shape, generator=generator) for name, shape in layout.shapes.items()}
    weights |= {name: weights[name].mT.contiguous().mT for name in weights if weights[name].ndim == 3}  # as slots have them
    x = torch.randn(3, 64, generator=generator)
    assert isinstance(groups, Tiles) == (of_adapters.kernel() is None)
    return layout.adapt("attention_out", x, x.clone(), groups, weights)


def of_a_layer(folder):
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(64, 64)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(64, 64, generator=generator))
        linear.bias.zero_()
    with torch.inference_mode():
        product = EightBit(linear)(torch.randn(20, 64, generator=generator))
        return PackedAttention([12, 8], 2)(0, product, product, product)


@pytest.mark.parametrize("another", [False, True], ids=["missing", "of another version"])
@pytest.mark.parametrize(
    "kernels, compute",
    [(of_tables, of_a_table), (of_adapters, of_an_adapter), (of_layers, of_a_layer)],
    ids=["plot", "adapters", "model"],
)
def test_a_kernel_that_cannot_be_used_is_named_in_the_log(tmp_path, monkeypatch, caplog, kernels, compute, another):
    if kernels.kernel() is None:
        pytest.skip("hplm was installed without a C compiler, or this processor is of another kind")
    (tmp_path / "a").mkdir()
    expected = compute(tmp_path / "a")
    library, other = next(Path(kernels.__file__).parent.glob("_kernel*.so")), tmp_path / "_kernel.so"
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "LIBRARY", other)
        if another:
            shutil.copy(library, other)
            patch.setattr(kernels, "VERSION", kernels.VERSION + 1)
        kernels.kernel.cache_clear()
        try:
            assert kernels.kernel() is None and str(other) in caplog.text
            (tmp_path / "b").mkdir()
            assert torch.allclose(compute(tmp_path / "b"), expected, atol=1e-3, rtol=1e-3)
        finally:
            kernels.kernel.cache_clear()
