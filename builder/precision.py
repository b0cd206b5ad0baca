"""In what precision learning computes."""

from __future__ import annotations

import torch

from hplm.engine.engine import resolve_dtype


def half_precision(device: torch.device) -> torch.autocast:
    """Products in 16 bits where the device multiplies those faster, as in serving; weights and sums stay in 32."""
    return torch.autocast(device.type, torch.bfloat16, resolve_dtype("auto", device) == torch.bfloat16)
