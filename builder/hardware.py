"""How what learns makes use of the device it learns on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hplm.engine.engine import resolve_dtype
from hplm.model.attention import PackedAttention

STEP_TOKENS = {"cpu": 1024, "cuda": 16384}  # of an adaptation's step: a GPU is not busy with fewer


def half_precision(device: torch.device) -> torch.autocast:
    """Products in 16 bits where the device multiplies those faster, as in serving; weights and sums stay in 32."""
    return torch.autocast(device.type, torch.bfloat16, products_of(device) == torch.bfloat16)


def products_of(device: torch.device) -> torch.dtype:
    return resolve_dtype("auto", device)


def step_tokens(device: torch.device) -> int:
    return STEP_TOKENS.get(device.type, STEP_TOKENS["cpu"])


def compiled(layers: Iterable[nn.Module], device: torch.device) -> None:
    """What lies between products is fused, in place, on CUDA alone: elsewhere it would ask for a C++ compiler."""
    if device.type == "cuda":
        for layer in layers:
            layer.compile(dynamic=True)


class OpaqueAttention(PackedAttention):
    """One that the compiler does not look into: it would compile anew for every other list of lengths."""

    __call__ = torch.compiler.disable(PackedAttention.__call__)
