"""Matrix products on CPUs that torch's own linear layer does not compute: in 16 bits, and in 8 bits.

In 16 bits, weights lie in the order in which oneDNN reads them. torch keeps a weight row by row, and oneDNN would bring it into
its own order again for each product. In 32 bits torch does not take oneDNN: there large products gain nothing by this, and
those of a single row lose.

In 8 bits there is a scale for each output of a weight, and one for each token, which depends on the token alone: its neighbours
in a batch do not change its numbers.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from hplm.compiled import HOW, number_fields, pointer_fields, vectors
from hplm.errors import InvalidInput
from hplm.model.tensors import rounded_up

mkldnn: Any = torch.ops.mkldnn  # these libraries have no types
onednn: Any = torch.ops.onednn

PREPACKED_ROWS = 16  # of the products that the order is chosen for; it is as good for others
EXACT = 16  # so many rows are not rounded up: a decoder often computes one
LEVELS = 127  # numbers from -127 to 127
EXACT_LEVELS = 63  # of weights: with these the sum of two products fits into 16 bits
UNSIGNED = 128  # added to a token's numbers: CPUs multiply unsigned by signed bytes
ROUNDING = 1.5 * 2**23 + UNSIGNED  # added to a number, it leaves the rounded number in the last byte
LEAST = 1e-30  # the largest number of a token or weight that is not rounded to zero
MOST_ROWS = 4096  # of one product
TRIED_ROWS = 16
WORTH = 1 << 16  # numbers to round that are worth another thread


class Prepacked(nn.Module):
    """A linear layer, of rows x inputs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight: Tensor = mkldnn._reorder_linear_weight(linear.weight.detach(), PREPACKED_ROWS)
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


class _Rounding(ctypes.Structure):
    _fields_ = (*HOW, *pointer_fields("x", "numbers", "scales"), *number_fields("rows", "inputs", "stride"))


class EightBitLinear(nn.Module):
    """A linear layer in 8 bits. It returns 32 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        if not available():
            raise InvalidInput("dtype int8 needs oneDNN, which this build of torch does not have: use fp32")
        weight = linear.weight.detach().float()
        self._scales = weight.abs().amax(1).clamp_(min=LEAST).div_(weight_levels())
        numbers = (weight / self._scales[:, None]).round_()
        self._packed: Tensor = onednn.qlinear_prepack(numbers.to(torch.int8).contiguous(), None)
        self._unsigned = numbers.sum(1).mul_(self._scales).mul_(-UNSIGNED)  # removes from an output what UNSIGNED added
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        self._outputs, self._inputs = weight.shape
        biases = cast("Tensor | None", linear.bias)  # its stub knows no layer without
        self._bias = torch.zeros(self._outputs) if biases is None else biases.detach().float()
        self._rounding = torch.full((self._inputs,), ROUNDING)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= MOST_ROWS:
            numbers, scales = self._product(x)
            return torch.addcmul(self._bias, numbers, scales, out=numbers)
        y = x.new_empty(len(x), self._outputs)
        for start in range(0, len(x), MOST_ROWS):
            rows = slice(start, start + MOST_ROWS)
            numbers, scales = self._product(x[rows])
            torch.addcmul(self._bias, numbers, scales, out=y[rows])
        return y

    def _product(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the product in units of each row's scale, and the scales."""
        numbers = torch.empty(rounded_up(len(x)), self._inputs, dtype=torch.uint8)
        scales = self._round(x, numbers[: len(x)])
        return _product(numbers, self._packed, self._scales, self._zeros, self._unsigned)[: len(x)], scales

    def _round(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Writes the rounded rows into `numbers`. Returns their scales: rows x 1."""
        if (compiled := vectors()) is not None:
            x, scales = x if x.stride(1) == 1 else x.contiguous(), x.new_empty(len(x), 1)
            how = compiled.how(torch.get_num_threads() if x.numel() >= WORTH else 1)
            rounding = _Rounding(*how, x.data_ptr(), numbers.data_ptr(), scales.data_ptr(), *x.shape, x.stride(0))
            compiled.library.hplm_round(ctypes.byref(rounding))
            return scales
        largest = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_()).clamp_(min=LEAST)
        numbers.view(torch.int8).copy_(torch.addcmul(self._rounding, x, LEVELS / largest).view(torch.int32))  # the last bytes
        return largest.div_(LEVELS)


def available() -> bool:
    return torch.backends.mkldnn.is_available()


def replace_products(module: nn.Module, kind: type[Prepacked] | type[EightBitLinear]) -> None:
    """Replaces the linear layers of a module, in place."""
    for part in list(module.modules()):
        for name, linear in list(part.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(part, name, kind(linear))


@cache
def weight_levels() -> int:
    """Returns the levels of weights. CPUs without VNNI add two products in 16 bits, which overflow if weights have 8 bits."""
    inputs = 64
    numbers = torch.full((TRIED_ROWS, inputs), UNSIGNED + LEVELS, dtype=torch.uint8)
    packed = onednn.qlinear_prepack(torch.full((inputs, inputs), LEVELS, dtype=torch.int8), None)
    y = _product(numbers, packed, torch.ones(inputs), torch.zeros(inputs, dtype=torch.int64), None)
    return LEVELS if bool((y == inputs * LEVELS * (UNSIGNED + LEVELS)).all()) else EXACT_LEVELS


def _product(numbers: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None) -> Tensor:
    return onednn.qlinear_pointwise(numbers, 1.0, 0, packed, scales, zeros, bias, 1.0, 0, torch.float32, "none", [], "")
