"""Choices of a training by its device: number formats, the size of a step, compilation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hplm.engine.engine import resolve_dtype
from hplm.model.attention import PackedAttention

STEP_TOKENS = {"cpu": 1024, "cuda": 16384}  # of an adaptation's step: fewer do not keep a GPU busy


def half_precision(device: torch.device) -> torch.autocast:
    """Autocast to 16-bit products where the device multiplies them faster, as in serving. Weights and sums stay in 32 bits."""
    return torch.autocast(device.type, torch.bfloat16, products_of(device) == torch.bfloat16)


def products_of(device: torch.device) -> torch.dtype:
    return resolve_dtype("auto", device)


def step_tokens(device: torch.device) -> int:
    return STEP_TOKENS.get(device.type, STEP_TOKENS["cpu"])


def compiled(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Compiles the layers in place, on CUDA alone: on a CPU, torch would need a C++ compiler."""
    if device.type == "cuda":
        OpaqueAttention.__call__ = torch.compiler.disable(PackedAttention.__call__)  # it imports the compiler, which takes long
        for layer in layers:
            layer.compile(dynamic=True)


class OpaqueAttention(PackedAttention):
    """Attention that torch does not compile: it would compile again for every new list of lengths."""

    __call__: Any = PackedAttention.__call__  # until layers are compiled
