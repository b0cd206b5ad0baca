"""Computes a staged step: the upper layers over its new tokens, and the logits of the tokens that come next."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hplm.adapters.parts import adapted, adapted_last
from hplm.generation.staging import Staged
from hplm.model.attention import avoid_plans
from hplm.model.cpu import keep_freed_memory
from hplm.model.prepacked import can_prepack, prepacked
from hplm.model.stacks import UpperStack


class Decoder:
    def __init__(self, upper: UpperStack, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        if device.type == "cpu":
            keep_freed_memory()
        avoid_plans(device)
        upper = upper.to(device=device, dtype=dtype).eval().requires_grad_(False)
        self._upper = prepacked(upper) if can_prepack(device, dtype) else upper

    @torch.inference_mode()
    def run(self, step: Staged) -> Tensor:
        """Returns logits of the next token of each sequence that gets one: sequences x vocabulary, fp32."""
        last = len(self._upper.layers) - 1
        adapters = [partial(adapted, step.adapters, layer) for layer in range(last)]
        adapters.append(partial(adapted_last, step.adapters, step.last_adapters, last))
        x = self._upper(step.sums, step.positions, None, step.attend, adapters, step.rows)
        return self._upper.logits(x)

    def wait(self) -> None:
        """Returns when the device has computed all that was started, with the copies of adapters."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
