"""Products in 8 bits, exact, row by row, on CPUs with and without VNNI; and with weights in oneDNN's own order."""

import os
import subprocess
import sys
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn

from hplm.model import products
from hplm.model.products import MOST_ROWS, EightBitLinear, Prepacked, can_prepack, replace_products
from testing.random_store import random_backbone
from testing.reference import product_in_eight_bits
from testing.toy import CONFIG

INPUTS, OUTPUTS = 48, 80


@pytest.fixture(scope="module")
def linear():
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS)


@pytest.fixture(scope="module")
def in_eight_bits(linear):
    return EightBitLinear(linear)


def tokens(rows, seed=0):
    """Returns rows of very different size, each with an outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, INPUTS, generator=generator) * 10 ** (4 * torch.rand(rows, 1, generator=generator) - 2)
    x[:, 7] *= 20
    return x


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 129, MOST_ROWS, MOST_ROWS + 3, 2 * MOST_ROWS])
@torch.inference_mode()
def test_a_product_equals_that_of_whole_numbers(linear, rows, compiled):
    """Numbers are rounded by the kernel, by several threads of it, or by torch. Tokens may lie apart."""
    x = torch.cat([tokens(rows)] * 2, dim=1)[:, INPUTS:]
    with nullcontext() if compiled else patch.object(products, "vectors", return_value=None):
        off = (EightBitLinear(linear)(x) - product_in_eight_bits(x, linear)).abs()
    assert (off <= 1e-5 * x.abs().amax(1, keepdim=True)).all()


@torch.inference_mode()
def test_every_row_of_a_large_batch_is_that_of_the_row_alone(in_eight_bits):
    """Rows are of very different size. Of many numbers, some are nearly halfway between two whole ones."""
    x = tokens(5000)
    together = in_eight_bits(x)
    parts = [in_eight_bits(part) for part in x.split([1, 2, 997, 3000, 1000])]
    assert torch.equal(together, torch.cat(parts))
    assert all(torch.equal(together[row], in_eight_bits(x[row : row + 1])[0]) for row in range(0, 5000, 7))


@torch.inference_mode()
def test_a_row_that_is_no_number_spoils_no_other_and_zeros_give_the_bias(linear, in_eight_bits):
    x = tokens(3)
    before = in_eight_bits(x)
    x[1, 5] = torch.nan
    after = in_eight_bits(x)
    assert torch.equal(after[[0, 2]], before[[0, 2]]) and after[1].isnan().all()
    x[1] = 0
    assert torch.equal(in_eight_bits(x)[1], linear.bias)
    without = nn.Linear(INPUTS, OUTPUTS)
    without.weight.zero_()
    assert torch.equal(EightBitLinear(without)(before.new_ones(2, INPUTS)), without.bias.expand(2, -1))


WITHOUT_VNNI = """
import torch
from torch import nn
from hplm.model.products import EightBitLinear, weight_levels
linear = nn.Linear(64, 64)
with torch.inference_mode():
    linear.weight.fill_(1)
    linear.bias.zero_()
    product = EightBitLinear(linear)(torch.ones(40, 64))
print(weight_levels(), float((product - 64).abs().max()))
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="this CPU is no x86 with AVX2")
def test_the_largest_products_do_not_overflow_without_vnni():
    """Without it oneDNN adds two products in 16 bits."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    ended = subprocess.run([sys.executable, "-c", WITHOUT_VNNI], env=environment, capture_output=True, text=True, check=True)
    levels, off = ended.stdout.split()
    assert int(levels) == 63
    assert float(off) < 1e-3


CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_it_equals_the_layer_that_it_is_made_of(rows, bias, dtype, tolerance):
    if dtype is torch.bfloat16 and not can_prepack(CPU, dtype):
        pytest.skip("this CPU has no products in bf16")
    torch.manual_seed(rows)
    linear = nn.Linear(96, 80, bias=bias).to(dtype).requires_grad_(False)
    x = torch.randn(rows, 96, dtype=dtype)
    with torch.inference_mode():
        found = Prepacked(linear)(x)
        assert found.dtype == dtype
        assert torch.allclose(found.float(), linear(x).float(), atol=tolerance, rtol=tolerance)


def test_the_products_of_a_stack_are_replaced_and_its_norms_stay():
    stack = random_backbone(CONFIG)[1].eval().requires_grad_(False)
    norm = stack.norm
    replace_products(stack, Prepacked)
    kinds = [[type(part) for part in stack.modules()].count(kind) for kind in (nn.Linear, Prepacked)]
    assert kinds == [0, 4 * CONFIG.upper_layers] and stack.norm is norm
