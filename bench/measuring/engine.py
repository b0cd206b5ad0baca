"""Times the engine's shared layers: tokens a second of each packing, beside bare matrix products.

All variants take turns in one process. `uniform` is the same number of tokens in texts of one length: no packing can beat it.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

import numpy as np
import torch

from bench.engine import EngineBench
from bench.measuring.attention_kernel import measure_attention_kernel
from bench.measuring.eight_bits import TOKENS as EIGHT_BITS_TOKENS
from bench.measuring.eight_bits import measure_eight_bits
from bench.measuring.layer_runs import LayerRuns, clock
from bench.measuring.onnx_whole import OnnxWhole, missing_packages
from bench.measuring.sizes import measure_sizes
from bench.measuring.text_lengths import VARIANCES, batches_of, filling, padding
from bench.tools.timing import Timing
from hplm.engine.engine import INT8, resolve_device, resolve_precision
from hplm.engine.packing import Concat, Naive, Packed, Packing, Slotted, Turbo
from hplm.engine.turbo import GroupCost
from testing.random_store import SIZES

TEXTS = 64  # of a batch
ROW = 400  # tokens, TCB's L
EQUAL = (20, 128)  # lengths compared with bare products
ONE = (128, 512)  # tokens of a batch of one
SLOT_COUNTS, SLOT_ROWS = (1, 2, 4, 7, 10, 16), (10, 32)  # TCB's Figs. 13 and 14
SWEPT = "minilm"  # the size that is measured with all slot counts and batch sizes
BATCH_SIZES = (8, 16, 32, 128)  # in addition to the 64 of the main figures


class Packings:
    """Measures every packing over the same layers."""

    def __init__(self, runs: LayerRuns) -> None:
        self._runs = runs
        self._packings: dict[str, Packing] = {
            "naive": Naive(),
            "turbo": Turbo(GroupCost.measured(runs.engine.seconds)),
            "concat": Concat(TEXTS, ROW),
            "slotted": Slotted(TEXTS, ROW),
            "packed": Packed(),
        }

    def packed(self, variance: int) -> dict:
        batches = batches_of(TEXTS, variance)
        runs = {name: self._runs.batches(packing, batches) for name, packing in self._packings.items()}
        equal = [np.full(TEXTS, round(int(lengths.sum()) / TEXTS)) for lengths in batches]
        runs["uniform"] = self._runs.batches(Packed(), equal)
        runs["packed_adapters"] = self._runs.batches(Packed(), batches, adapters=True)
        runs["packed_first"] = self._runs.batches(Packed(), batches, first=True)
        timings = self._runs.time(runs)
        return rates(timings) | {
            "to_uniform": ratios(timings, "uniform"),
            "packed_to": {name: round(timings[name].median / timings["packed"].median, 3) for name in ("naive", "turbo")},
            "padding": {name: round(padding(packing, batches), 3) for name, packing in self._packings.items()},
            "sheets": {name: len(packing.arrange(batches[0])) for name, packing in self._packings.items()},
        }

    def slots(self, rows: int) -> dict:
        """Measures full rows that are cut into more and more slots. Returns the speed-up over one slot a row."""
        lengths = filling(rows * ROW, VARIANCES[0])
        runs = {
            str(count): self._runs.batches(Slotted(rows, ROW, ROW // count) if count > 1 else Concat(rows, ROW), [lengths])
            for count in SLOT_COUNTS
        }
        runs["packed"] = self._runs.batches(Packed(), [lengths])
        timings = self._runs.time(runs)
        return {name: round(timings["1"].median / timing.median, 3) for name, timing in timings.items()}

    def batch(self, texts: int) -> dict:
        batches = batches_of(texts, VARIANCES[-1])
        return rates(self._runs.time({name: self._runs.batches(packing, batches) for name, packing in self._packings.items()}))

    def masks(self) -> dict:
        """Measures attention alone with TCB's masks: within texts, causal, and from targets to sources of other lengths.

        Returns the targets' tokens a second. Queries, keys and values are random.
        """
        batches, sources = batches_of(TEXTS, VARIANCES[-1]), batches_of(TEXTS, VARIANCES[0])
        figures: dict = {"within": {}, "causal": {}, "cross": {}}
        for kind, rate in figures.items():
            runs = {name: self._runs.attention(packing, kind, batches, sources) for name, packing in self._packings.items()}
            rate.update(rates(self._runs.time(runs)))
        return figures | {
            "packed_to": {kind: round(rate["packed"] / rate["naive"], 3) for kind, rate in figures.items()},
            "causal_to_within": {name: round(figures["causal"][name] / rate, 3) for name, rate in figures["within"].items()},
        }


def measure_equal(runs: LayerRuns, tokens: int) -> dict:
    """Measures texts of one length, beside bare matrix products of the same shapes."""
    lengths = np.full(1280 // tokens, tokens)
    timed = {
        "engine": runs.batches(Packed(), [lengths]),
        "bare": runs.bare(int(lengths.sum())),
        "transformers": runs.plain(len(lengths), tokens),
    }
    timings = runs.time(timed)
    return rates(timings) | {"share_of_bare": ratios(timings, "bare")}


def measure_one(runs: LayerRuns, tokens: int) -> dict:
    """Measures one text, beside the layers of `transformers`."""
    timed = {"engine": runs.batches(Packed(), [np.array([tokens])]), "transformers": runs.plain(1, tokens)}
    timings = runs.time(timed)
    return {f"{name}_ms": round(timing.median * tokens / 1e3, 3) for name, timing in timings.items()} | {
        "to_plain": round(timings["transformers"].median / timings["engine"].median, 3),
        "to_plain_least": round(timings["transformers"].least / timings["engine"].least, 3),
    }


def bench_engine(case: EngineBench) -> dict:
    device = resolve_device("auto")
    dtype = resolve_precision(case.dtype, device).dtype
    figures: dict = {}
    for size in case.sizes:
        print(f"measuring {size} on {device} in {dtype}", file=sys.stderr, flush=True)
        runs = LayerRuns(SIZES[size], device, dtype, case.seconds)
        packings = Packings(runs)
        figures[size.replace("-", "_")] = of_size = {}
        if device.type == "cpu":
            whole = OnnxWhole(SIZES[size], torch.get_num_threads()) if size == SWEPT and not missing_packages() else None
            of_size[INT8] = measure_eight_bits(runs, whole)
        if case.only_int8:
            continue
        of_size |= {f"var{variance}": packings.packed(variance) for variance in VARIANCES}
        of_size["equal"] = {str(tokens): measure_equal(runs, tokens) for tokens in EQUAL}
        of_size["one"] = {str(tokens): measure_one(runs, tokens) for tokens in ONE}
        if device.type == "cpu":
            of_size["sizes"] = measure_sizes(SIZES[size], runs.engine, case.seconds)
            of_size["attention_kernel"] = measure_attention_kernel(runs)
        if size == SWEPT:
            figures["slots"] = {str(rows): packings.slots(rows) for rows in SLOT_ROWS}
            figures["masks"] = packings.masks()
            figures["batch"] = {str(texts): packings.batch(texts) for texts in BATCH_SIZES}
    in_eight_bits = [one["int8_over_fp32"] for of_size in figures.values() for one in of_size.get(INT8, {}).values()]
    return figures | {
        "int8_over_fp32": min(in_eight_bits, default=None),  # the least of all sizes, for one text and a batch
        "without_onnx": missing_packages(),
        "dtype": str(dtype).removeprefix("torch."),
        "bf16": "native" if resolve_precision("auto", device).dtype is torch.bfloat16 else "emulated",
        "device": device.type,
        "threads": torch.get_num_threads(),
        "clock": clock(device).__name__,
        "torch": torch.__version__,
        "case": asdict(case),
    }


def rates(timings: dict[str, Timing]) -> dict:
    """Returns tokens a second."""
    return {name: round(1e6 / timing.median) for name, timing in timings.items()}


def ratios(timings: dict[str, Timing], base: str) -> dict:
    """Returns ratios of the medians, and of the fastest rounds, which other work on the machine disturbs least."""
    others = [name for name in timings if name != base]
    return {name: round(timings[base].median / timings[name].median, 3) for name in others} | {
        f"{name}_least": round(timings[base].least / timings[name].least, 3) for name in others
    }


def table_of(figures: dict) -> str:
    lines = [", ".join(str(figures[name]) for name in ("device", "dtype", "threads", "clock", "torch")) + "; tokens a second"]
    for size in (size.replace("-", "_") for size in figures["case"]["sizes"]):
        for variance in VARIANCES if f"var{VARIANCES[0]}" in figures[size] else ():
            one = figures[size][f"var{variance}"]
            names = (*one["padding"], "uniform", "packed_adapters", "packed_first")
            lines.append(f"{size} var{variance:<4} " + "  ".join(f"{name} {one[name]}" for name in names))
            lines.append(f"{'':12} packed / uniform {one['to_uniform']['packed']}, " + ", ".join(
                f"/ {name} {ratio}" for name, ratio in one["packed_to"].items()
            ) + ", padding " + ", ".join(f"{name} {share}" for name, share in one["padding"].items()))  # fmt: skip
        for tokens, one in figures[size].get("equal", {}).items():
            lines.append(f"{size} equal {tokens:>4}: of bare products {one['share_of_bare']}")
        for tokens, one in figures[size].get("one", {}).items():
            lines.append(f"{size} alone {tokens:>4}: {one}")
        if "sizes" in figures[size]:
            lines.append(f"{size} batches of many sizes: {figures[size]['sizes']}")
        for name, one in figures[size].get("attention_kernel", {}).items():
            lines.append(f"{size} mixed lengths in {name}, compiled attention to torch's: {one}")
        for name, one in figures[size].get(INT8, {}).items():
            lines.append(f"{size} {name} of {EIGHT_BITS_TOKENS} in 8 bits: {one}")
    lines += [f"slots of {rows} rows, speed-up over one: {one}" for rows, one in figures.get("slots", {}).items()]
    for name, one in figures.get("masks", {}).items():
        lines.append(f"attention alone, {name}: {one}")
    lines += [f"batch of {texts}: {one}" for texts, one in figures.get("batch", {}).items()]
    if figures["without_onnx"]:
        lines.append(f"not compared with ONNX Runtime: {', '.join(figures['without_onnx'])} are not installed")
    return "\n".join(lines)
