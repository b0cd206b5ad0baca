import numpy as np
import pytest
import torch

from hplm.adapters.groups import Groups, linear

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "slots",
    [[2], [1] * 9, [0, 1, 0, 3, 3, 3, 3, 3, 3, 3, 1, 0], list(range(4)) * 5, [0] * 50 + [1]],
    ids=["one row", "one slot", "mixed", "interleaved", "skewed"],
)
def test_every_row_gets_the_weights_of_its_own_slot(slots):
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(4, 3, 8, generator=generator), torch.randn(4, 3, generator=generator)
    x = torch.randn(len(slots), 8, generator=generator)
    groups = Groups(np.array(slots), CPU)
    mapped = groups.collect(linear(groups.spread(x), groups, weight, bias))
    for row, slot in enumerate(slots):
        assert torch.allclose(mapped[row], weight[slot] @ x[row] + bias[slot], atol=1e-5)


@pytest.mark.parametrize(
    "slots, copies",
    [
        ([2, 2, 3, 3, 4, 4], []),
        ([3, 3, 0, 0, 2, 2], ["weights"]),
        ([1, 1, 1, 1, 2, 2], ["weights"]),  # three tiles
        ([1] * 9 + [2], ["rows", "weights"]),
        ([0, 1, 0, 1, 0, 1, 0, 1], ["rows"]),
    ],
    ids=str,
)
def test_nothing_is_copied_that_lies_well(slots, copies):
    weight, x = torch.randn(5, 3, 8), torch.randn(len(slots), 8)
    groups = Groups(np.array(slots), CPU)
    copied = {
        "rows": groups.spread(x).data_ptr() != x.data_ptr(),
        "weights": groups.pick(weight).untyped_storage().data_ptr() != weight.untyped_storage().data_ptr(),
    }
    assert [name for name, happened in copied.items() if happened] == copies
    mapped = groups.collect(linear(groups.spread(x), groups, weight, torch.zeros(5, 3)))
    for row, slot in enumerate(slots):
        assert torch.allclose(mapped[row], weight[slot] @ x[row], atol=1e-5)
