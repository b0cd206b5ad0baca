"""Matrix products in 16 bits on CPUs, for inference, whose weights lie in the order in which oneDNN reads them.

torch keeps a weight row by row, and oneDNN would bring it into its own order again for each product. In 32 bits torch does not
take oneDNN: there large products gain nothing by this, and those of a single row lose.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from hplm.model.stacks import UpperStack
from hplm.model.tensors import rounded_up

mkldnn: Any = torch.ops.mkldnn  # the library has no types

ROWS = 16  # of the products that the order is chosen for; it is as good for others
EXACT = 16  # so many rows are not rounded up: a decoder often computes one


class Prepacked(nn.Module):
    """A linear layer, of rows x inputs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight: Tensor = mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self._bias = cast("Tensor | None", linear.bias)  # its stub knows no layer without

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        if rows > EXACT and (size := rounded_up(rows)) > rows:
            x = with_rows(x, size)
        return mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")[:rows]


def with_rows(x: Tensor, size: int) -> Tensor:
    """Returns a tensor with so many rows: those of `x`, and zeros behind them."""
    y = x.new_empty(size, x.shape[1])
    y[: len(x)] = x
    y[len(x) :] = 0
    return y


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of this type should be prepacked on this device, and oneDNN can multiply them."""
    on_cpu = device.type == "cpu" and torch.backends.mkldnn.is_available()
    return on_cpu and dtype is torch.bfloat16 and mkldnn._is_mkldnn_bf16_supported()


@torch.no_grad()
def prepacked(stack: UpperStack) -> UpperStack:
    """Returns a stack that computes the same. It shares with the other one what is not reordered."""
    packed = copy.deepcopy(stack, {id(weight): weight for weight in stack.parameters()})
    for module in list(packed.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, nn.Linear):
                setattr(module, name, Prepacked(part))
    return packed
