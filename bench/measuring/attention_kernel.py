"""Times the shared layers with the compiled attention, beside torch's, on texts of mixed lengths."""

from __future__ import annotations

import numpy as np
import torch

from bench.measuring.layer_runs import LayerRuns
from hplm.engine.engine import INT8, Engine
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import random_backbone

TOKENS = (32, 94, 256, 1024)  # of a batch
LENGTHS = (8, 65)  # of texts, the last one excluded


def measure_attention_kernel(runs: LayerRuns) -> dict:
    """Returns the speed of the layers over that with torch's attention, by precision and tokens. `runs` are on a CPU."""
    engines = {
        str(runs.dtype).removeprefix("torch."): runs.engine,
        INT8: Engine(random_backbone(runs.config)[1], runs.device, torch.float32, eight_bits=True),
    }
    return {name: {str(tokens): _speed(runs, engine, tokens) for tokens in TOKENS} for name, engine in engines.items()}


def _speed(runs: LayerRuns, engine: Engine, tokens: int) -> float:
    lengths = _mixed(tokens)
    attends = {name: PackedAttention(lengths, runs.config.heads, compiled=name == "kernel") for name in ("kernel", "torch")}
    timings = runs.time({name: runs.layers(engine, attend, tokens) for name, attend in attends.items()})
    return round(timings["torch"].median / timings["kernel"].median, 3)


def _mixed(tokens: int) -> list[int]:
    """Returns lengths of texts with so many tokens together, the longest first."""
    generator, lengths = np.random.default_rng(tokens), list[int]()
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(int(generator.integers(*LENGTHS)), left))
    return sorted(lengths, reverse=True)
