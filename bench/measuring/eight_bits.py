"""Times the shared layers with products in 8 bits, beside fp32 and beside a whole model of ONNX Runtime in 8 bits."""

from __future__ import annotations

import torch

from bench.measuring.layer_runs import LayerRuns
from bench.measuring.onnx_whole import OnnxWhole
from bench.tools.timing import Timing
from hplm.engine.engine import INT8, Engine
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import random_backbone

TEXTS = {"one": 1, "batch": 10}
TOKENS = 128  # of a text


def measure_eight_bits(runs: LayerRuns, whole: OnnxWhole | None) -> dict:
    """`runs` are on a CPU, and `whole` is of the same size; None: it is not compared."""
    engines = {
        name: Engine(random_backbone(runs.config)[1], runs.device, torch.float32, eight_bits=name == INT8)
        for name in ("fp32", INT8)
    }
    return {name: _measured(runs, engines, whole, texts) for name, texts in TEXTS.items()}


def _measured(runs: LayerRuns, engines: dict[str, Engine], whole: OnnxWhole | None, texts: int) -> dict:
    tokens = texts * TOKENS
    attend = PackedAttention([TOKENS] * texts, runs.config.heads)
    timed = {name: runs.layers(engine, attend, tokens) for name, engine in engines.items()}
    if whole is not None:
        inputs = whole.inputs(texts, TOKENS)
        timed["onnx"] = runs.timed(lambda: whole.run(inputs), tokens)
    timings = runs.time(timed)
    figures = {f"{name}_ms": round(timing.median * tokens / 1e3, 3) for name, timing in timings.items()}
    eight_bits = _speeds_of(timings, INT8)
    figures |= {"int8_over_fp32": eight_bits["fp32"], "int8_over_fp32_least": eight_bits["fp32_least"]}
    if whole is not None:
        layers = whole.layers / runs.config.upper_layers
        figures |= {"onnx_over_int8": eight_bits["onnx"], "onnx_over_int8_least": eight_bits["onnx_least"]}
        figures["of_ratio_of_layers"] = round(eight_bits["onnx"] / layers, 3)
    return figures


def _speeds_of(timings: dict[str, Timing], fast: str) -> dict:
    """Returns how many times as fast one is as each of the others."""
    others = [name for name in timings if name != fast]
    return {name: round(timings[name].median / timings[fast].median, 3) for name in others} | {
        f"{name}_least": round(timings[name].least / timings[fast].least, 3) for name in others
    }
