import numpy as np
import pytest
import torch

from hplm.adapters.groups import Groups, bottleneck, head

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "slots",
    [[2], [1] * 9, [0, 1, 0, 3, 3, 3, 3, 3, 3, 3, 1, 0], list(range(4)) * 5, [0] * 50 + [1]],
    ids=["one row", "one slot", "mixed", "interleaved", "skewed"],
)
def test_every_row_gets_the_weights_of_its_own_slot(slots):
    generator = torch.Generator().manual_seed(0)
    weights = {
        "down": torch.randn(4, 3, 8, generator=generator),
        "down_bias": torch.randn(4, 3, generator=generator),
        "up": torch.randn(4, 8, 3, generator=generator),
        "up_bias": torch.randn(4, 8, generator=generator),
    }
    heads = {"weight": torch.randn(4, 5, 8, generator=generator), "bias": torch.randn(4, 5, generator=generator)}
    x = torch.randn(len(slots), 8, generator=generator)
    groups = Groups(np.array(slots), CPU)
    adapted, logits = bottleneck(x, groups, weights), head(x, groups, heads)
    for row, slot in enumerate(slots):
        inner = torch.relu(weights["down"][slot] @ x[row] + weights["down_bias"][slot])
        expected = x[row] + weights["up"][slot] @ inner + weights["up_bias"][slot]
        assert torch.allclose(adapted[row], expected, atol=1e-5)
        assert torch.allclose(logits[row], heads["weight"][slot] @ x[row] + heads["bias"][slot], atol=1e-5)
