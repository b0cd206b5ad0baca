"""Choices of a training by its device: number formats, and the size of a step."""

from __future__ import annotations

import torch

from hplm.engine.engine import resolve_dtype
from hplm.model.attention import avoid_plans

STEP_TOKENS = {"cpu": 1024, "cuda": 16384}  # of an adaptation's step: fewer do not keep a GPU busy


def half_precision(device: torch.device) -> torch.autocast:
    """Autocast to 16-bit products where the device multiplies them faster, as in serving. Weights and sums stay in 32 bits.

    From now on the process makes no plans for attention on CUDA.
    """
    avoid_plans(device)
    return torch.autocast(device.type, torch.bfloat16, products_of(device) == torch.bfloat16)


def products_of(device: torch.device) -> torch.dtype:
    return resolve_dtype("auto", device)


def step_tokens(device: torch.device) -> int:
    return STEP_TOKENS.get(device.type, STEP_TOKENS["cpu"])
