"""Products with weights in oneDNN's own order."""

import pytest
import torch
from torch import nn

from hplm.model.prepacked import Prepacked, can_prepack

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 100, 300])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_it_equals_the_layer_that_it_is_made_of(rows, bias, dtype, tolerance):
    if not can_prepack(CPU, dtype):
        pytest.skip(f"this CPU has no products in {dtype}")
    torch.manual_seed(rows)
    linear = nn.Linear(96, 80, bias=bias).to(dtype).requires_grad_(False)
    x = torch.randn(rows, 96, dtype=dtype)
    with torch.inference_mode():
        found = Prepacked(linear)(x)
        assert found.dtype == dtype
        assert torch.allclose(found.float(), linear(x).float(), atol=tolerance, rtol=tolerance)
