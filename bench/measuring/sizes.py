"""Times the shared layers on batches of many sizes, as those of real texts are, padded as they are served.

Beside them are batches of one size, and both with the weights as torch keeps them. All four take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from bench.tools.timing import alternate_timed
from hplm.engine.engine import Engine
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import random_backbone
from hplm.model.config import BackboneConfig
from hplm.model.layer import Attend
from hplm.model.sizes import rounded_up

TOKENS = (300, 1281)  # of a batch: at least, and below
TEXT = 20  # tokens

Through = Callable[[Tensor, Attend], Tensor]


def measure_sizes(config: BackboneConfig, engine: Engine, seconds: float) -> dict:
    plain = random_backbone(config)[1].to(engine.device, engine.dtype).eval().requires_grad_(False)
    x = torch.randn(rounded_up(TOKENS[1]), config.hidden, generator=torch.Generator().manual_seed(1)).to(
        engine.device, engine.dtype
    )

    def timed(through: Through, sizes: Iterator[int], few_sizes: bool) -> Callable[[int], float]:
        def run(_: int) -> float:
            tokens = next(sizes)
            rows = rounded_up(tokens) if few_sizes else tokens
            texts, rest = divmod(tokens, TEXT)
            lengths = [TEXT] * texts + [length for length in (rest, rows - tokens) if length]
            start = time.perf_counter()
            through(x[:rows], PackedAttention(lengths, config.heads))
            return (time.perf_counter() - start) / tokens

        return run

    same = sum(TOKENS) // 2
    with torch.inference_mode():
        timings = alternate_timed(
            {
                "mixed": timed(engine.through, _drawn(1), engine.takes_few_sizes),
                "same": timed(engine.through, repeat(same), engine.takes_few_sizes),
                "torch_mixed": timed(plain.through, _drawn(2), few_sizes=False),
                "torch_same": timed(plain.through, repeat(same), few_sizes=False),
            },
            seconds,
            warm_up=2,
        )
    rate = {name: 1e6 / timing.median for name, timing in timings.items()}
    return {
        **{name: round(tokens_s) for name, tokens_s in rate.items()},
        "mixed_over_same": round(rate["mixed"] / rate["same"], 3),
        "torch_mixed_over_same": round(rate["torch_mixed"] / rate["torch_same"], 3),
        "mixed_over_torch": round(rate["mixed"] / rate["torch_mixed"], 3),
        "same_over_torch": round(rate["same"] / rate["torch_same"], 3),
    }


def _drawn(seed: int) -> Iterator[int]:
    chance = np.random.default_rng(seed)
    while True:
        yield int(chance.integers(*TOKENS))
