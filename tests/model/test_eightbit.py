"""Products in 8 bits: exact, row by row, on CPUs with and without VNNI."""

import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hplm.model import eightbit
from hplm.model import kernel as kernels
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import random_backbone
from hplm.model.eightbit import MOST_ROWS, EightBit, to_eight_bits, weight_levels
from hplm.model.sizes import rounded_up
from testing.toy import CONFIG

INPUTS, OUTPUTS = 48, 80
needs_kernel = pytest.mark.skipif(kernels.kernel() is None, reason="hplm was installed without a C compiler")


@pytest.fixture(scope="module")
def linear():
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS)


@pytest.fixture(scope="module")
def in_eight_bits(linear):
    return EightBit(linear)


def tokens(rows, seed=0):
    """Returns rows of very different size, each with an outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, INPUTS, generator=generator) * 10 ** (4 * torch.rand(rows, 1, generator=generator) - 2)
    x[:, 7] *= 20
    return x


def whole_numbers(rows, levels):
    scales = (rows.abs().amax(1, keepdim=True) / levels).double()
    return (rows / scales).round(), scales


def exact(linear, x):
    numbers, scales = whole_numbers(x, 127)
    weight, weight_scales = whole_numbers(linear.weight, weight_levels())
    return (numbers @ weight.T * scales * weight_scales.T + linear.bias).float()


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 129, MOST_ROWS, MOST_ROWS + 3, 2 * MOST_ROWS])
@torch.inference_mode()
def test_a_product_equals_that_of_whole_numbers(linear, in_eight_bits, rows):
    x = tokens(rows)
    off = (in_eight_bits(x) - exact(linear, x)).abs()
    assert (off <= 1e-5 * x.abs().amax(1, keepdim=True)).all()


@given(others=st.lists(st.integers(0, 2**31), max_size=40), place=st.integers(0, 40))
@torch.inference_mode()
def test_neighbours_do_not_change_a_row(in_eight_bits, others, place):
    row = tokens(1, seed=99)
    rows = [tokens(1, seed) for seed in others]
    rows.insert(min(place, len(rows)), row)
    assert torch.equal(in_eight_bits(torch.cat(rows))[min(place, len(rows) - 1)], in_eight_bits(row)[0])


@torch.inference_mode()
def test_every_row_of_a_large_batch_is_that_of_the_row_alone():
    """Of many numbers, some are nearly halfway between two whole ones."""
    in_eight_bits = EightBit(nn.Linear(72, OUTPUTS))
    x = torch.randn(5000, 72, generator=torch.Generator().manual_seed(0))
    together = in_eight_bits(x)
    parts = [in_eight_bits(part) for part in x.split([1, 2, 997, 3000, 1000])]
    assert torch.equal(together, torch.cat(parts))
    assert all(torch.equal(together[row], in_eight_bits(x[row : row + 1])[0]) for row in range(0, 5000, 7))


@torch.inference_mode()
def test_a_row_that_is_no_number_spoils_no_other():
    in_eight_bits = EightBit(nn.Linear(INPUTS, OUTPUTS))
    x = tokens(3)
    before = in_eight_bits(x)
    x[1, 5] = torch.nan
    after = in_eight_bits(x)
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert after[1].isnan().all()


@torch.inference_mode()
def test_a_row_of_zeros_and_weights_of_zeros_give_the_bias():
    linear = nn.Linear(INPUTS, OUTPUTS)
    linear.weight[3] = 0
    in_eight_bits = EightBit(linear)
    assert torch.equal(in_eight_bits(torch.zeros(2, INPUTS))[1], linear.bias)
    assert torch.equal(in_eight_bits(tokens(2))[:, 3], linear.bias[3].expand(2))


@given(rows=st.integers(1, MOST_ROWS))
def test_few_different_numbers_of_rows_are_computed_and_little_in_vain(rows):
    assert rows <= rounded_up(rows) <= max(rows + 15, rows * 9 / 8)
    assert len({rounded_up(rows) for rows in range(1, MOST_ROWS + 1)}) == 48


@torch.inference_mode()
def test_layers_in_eight_bits_are_near_those_in_32_bits_and_independent_of_the_batch():
    (_, upper), (_, same) = random_backbone(CONFIG), random_backbone(CONFIG)
    to_eight_bits(upper.layers)
    assert not any(isinstance(module, nn.Linear) for module in upper.modules())
    x, lengths = torch.randn(4 + 4 + 9, CONFIG.hidden), [4, 4, 9]
    mixed = upper.through(x, PackedAttention(lengths, CONFIG.heads))
    expected = same.through(x, PackedAttention(lengths, CONFIG.heads))
    assert 0 < float((mixed - expected).norm() / expected.norm()) < 0.02
    for own, alone in zip(mixed.split(lengths), x.split(lengths), strict=True):
        assert torch.equal(own, upper.through(alone, PackedAttention([len(alone)], CONFIG.heads)))


@needs_kernel
@given(rows=st.integers(1, 40), inputs=st.integers(1, 200), seed=st.integers(0, 99), threads=st.booleans())
@torch.inference_mode()
def test_the_kernel_rounds_as_torch_does(rows, inputs, seed, threads):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, 2 * inputs, generator=generator) * 10 ** (8 * torch.rand(rows, 1, generator=generator) - 4))[:, ::2]
    x = x if seed % 2 else x.contiguous()[:, : max(1, inputs - 1)]
    in_eight_bits, found = EightBit(nn.Linear(x.shape[1], OUTPUTS)), []
    for compiled in (kernels.kernel(), None):
        numbers = torch.zeros(x.shape, dtype=torch.uint8)
        with (
            patch.object(eightbit, "kernel", lambda compiled=compiled: compiled),
            patch.object(kernels, "WORTH", 10**9 * threads),
        ):
            scales = in_eight_bits._round(x, numbers)
        found.append(scales)
        assert ((numbers.double() - 128) - x.double() / scales.double()).abs().max() <= 0.5 + 1e-4
    assert torch.equal(*found)


def test_without_the_kernel_torch_rounds_and_the_log_says_so(linear, tmp_path, monkeypatch, caplog):
    kernels.kernel.cache_clear()
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "_kernel.so")
    try:
        with torch.inference_mode():
            off = (EightBit(linear)(tokens(20)) - exact(linear, tokens(20))).abs()
        assert (off <= 1e-5 * tokens(20).abs().amax(1, keepdim=True)).all()
    finally:
        kernels.kernel.cache_clear()
    assert str(tmp_path) in caplog.text


WITHOUT_VNNI = """
import torch
from torch import nn
from hplm.model.eightbit import EightBit, weight_levels
linear = nn.Linear(64, 64)
with torch.inference_mode():
    linear.weight.fill_(1)
    linear.bias.zero_()
    product = EightBit(linear)(torch.ones(40, 64))
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
