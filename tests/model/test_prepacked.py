"""Products with weights in oneDNN's own order."""

import pytest
import torch
from torch import nn

from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import random_backbone
from hplm.model.prepacked import Prepacked, can_prepack, prepacked
from testing.toy import CONFIG

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 100, 300])
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


def test_a_stack_is_prepacked_and_the_other_one_stays_as_it_is():
    stack = random_backbone(CONFIG)[1].eval().requires_grad_(False)
    packed = prepacked(stack)
    products = [sum(isinstance(part, nn.Linear) for part in one.modules()) for one in (stack, packed)]
    assert products == [4 * CONFIG.upper_layers, 0]
    assert packed.norm.weight is stack.norm.weight
    x, attend = torch.randn(33, CONFIG.hidden), PackedAttention([20, 13], CONFIG.heads)
    with torch.inference_mode():
        assert torch.allclose(packed.through(x, attend), stack.through(x, attend), atol=1e-4, rtol=1e-4)


def test_only_16_bits_on_a_cpu_are_prepacked():
    assert not can_prepack(torch.device("cuda"), torch.bfloat16)
    assert not can_prepack(CPU, torch.float32)
