"""Times the engine's shared layers: tokens a second of each packing, beside bare matrix products.

Lengths are as in TCB 6.1: normal, mean 20, variance 20 or 100, clipped to 3 ... 100, 64 texts a batch. All variants take turns
in one process. `uniform` is the same number of tokens in texts of one length, which no packing can beat.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bench.engine import EngineBench
from bench.measuring.onnx_whole import OnnxWhole, missing_packages
from bench.measuring.sizes import measure_sizes
from bench.tools.timing import Timing, alternate_timed
from hplm.adapters.layout import adapter_layout
from hplm.engine.engine import INT8, Engine, resolve_device, resolve_precision
from hplm.engine.packing import Concat, Naive, Packed, Packing, Slotted, Turbo
from hplm.engine.turbo import GroupCost
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import random_backbone
from hplm.model.config import BackboneConfig
from hplm.model.layer import Adapt
from testing.random_store import SIZES

TEXTS = 64
BATCHES = 4  # different batches, run in turn
MEAN, VARIANCES, CLIP = 20, (20, 100), (3, 100)
ROW = 400  # tokens, TCB's L
EQUAL = (20, 128)  # lengths compared with bare products
ONE = (128, 512)  # tokens of a batch of one
TENANTS, RANK = 16, 32
SLOT_COUNTS, SLOT_ROWS = (1, 2, 4, 7, 10, 16), (10, 32)  # TCB's Figs. 13 and 14
SWEPT = "minilm"  # the size that is measured with all slot counts and batch sizes
BATCH_SIZES = (8, 16, 32, 128)  # in addition to the 64 of the main figures
IN_EIGHT_BITS = {"one": 1, "batch": 10}  # texts of EIGHT_BITS_TOKENS
EIGHT_BITS_TOKENS = 128
MIXED, MIXED_LENGTHS = (32, 94, 256, 1024), (8, 65)  # tokens of a batch; the texts' lengths, the last one excluded


class MeasuredLayers:
    """Measures the shared upper layers of one size, on one device, in one precision."""

    def __init__(self, config: BackboneConfig, device: torch.device, dtype: torch.dtype, seconds: float) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.seconds = seconds
        self._clock = clock(device)
        self.engine = Engine(random_backbone(config)[1], device, dtype)
        self.turbo = Turbo(GroupCost.measured(self.engine.seconds))
        self.packings: dict[str, Packing] = {
            "naive": Naive(),
            "turbo": self.turbo,
            "concat": Concat(TEXTS, ROW),
            "slotted": Slotted(TEXTS, ROW),
            "packed": Packed(),
        }

    def packed(self, variance: int) -> dict:
        batches = batches_of(TEXTS, variance)
        runs = {name: self._batches(packing, batches) for name, packing in self.packings.items()}
        equal = [np.full(TEXTS, round(int(lengths.sum()) / TEXTS)) for lengths in batches]
        runs["uniform"] = self._batches(Packed(), equal)
        runs["packed_adapters"] = self._batches(Packed(), batches, adapters=True)
        runs["packed_first"] = self._batches(Packed(), batches, first=True)
        timings = self._time(runs)
        return rates(timings) | {
            "to_uniform": ratios(timings, "uniform"),
            "packed_to": {name: round(timings[name].median / timings["packed"].median, 3) for name in ("naive", "turbo")},
            "padding": {name: round(padding(packing, batches), 3) for name, packing in self.packings.items()},
            "sheets": {name: len(packing.arrange(batches[0])) for name, packing in self.packings.items()},
        }

    def equal(self, tokens: int) -> dict:
        """Measures texts of one length, beside bare matrix products of the same shapes."""
        lengths = np.full(1280 // tokens, tokens)
        runs = {
            "engine": self._batches(Packed(), [lengths]),
            "bare": self._bare(int(lengths.sum())),
            "transformers": self._plain(len(lengths), tokens),
        }
        timings = self._time(runs)
        return rates(timings) | {"share_of_bare": ratios(timings, "bare")}

    def one(self, tokens: int) -> dict:
        runs = {"engine": self._batches(Packed(), [np.array([tokens])]), "transformers": self._plain(1, tokens)}
        timings = self._time(runs)
        return {f"{name}_ms": round(timing.median * tokens / 1e3, 3) for name, timing in timings.items()} | {
            "to_plain": round(timings["transformers"].median / timings["engine"].median, 3),
            "to_plain_least": round(timings["transformers"].least / timings["engine"].least, 3),
        }

    def eight_bits(self, whole: OnnxWhole | None) -> dict:
        """Measures products in 8 bits beside fp32, and beside the `whole` model of ONNX Runtime in 8 bits."""
        engines = {
            name: Engine(random_backbone(self.config)[1], self.device, torch.float32, eight_bits=name == INT8)
            for name in ("fp32", INT8)
        }
        return {name: self._in_eight_bits(engines, whole, texts) for name, texts in IN_EIGHT_BITS.items()}

    def _in_eight_bits(self, engines: dict[str, Engine], whole: OnnxWhole | None, texts: int) -> dict:
        tokens = texts * EIGHT_BITS_TOKENS
        attend = PackedAttention([EIGHT_BITS_TOKENS] * texts, self.config.heads)
        x = torch.randn(tokens, self.config.hidden, generator=torch.Generator().manual_seed(1))

        def layers_of(engine: Engine) -> Callable[[int], float]:
            return lambda _: self._timed(lambda: engine.through(x, attend), tokens)

        runs = {name: layers_of(engine) for name, engine in engines.items()}
        if whole is not None:
            inputs = whole.inputs(texts, EIGHT_BITS_TOKENS)
            runs["onnx"] = lambda _: self._timed(lambda: whole.run(inputs), tokens)
        timings = self._time(runs)
        figures = {f"{name}_ms": round(timing.median * tokens / 1e3, 3) for name, timing in timings.items()}
        eight_bits = speeds_of(timings, INT8)
        figures |= {"int8_over_fp32": eight_bits["fp32"], "int8_over_fp32_least": eight_bits["fp32_least"]}
        if whole is not None:
            layers = whole.layers / self.config.upper_layers
            figures |= {"onnx_over_int8": eight_bits["onnx"], "onnx_over_int8_least": eight_bits["onnx_least"]}
            figures["of_ratio_of_layers"] = round(eight_bits["onnx"] / layers, 3)
        return figures

    def attention_kernel(self) -> dict:
        """Measures the layers with the compiled attention. Returns their speed over that with torch's, by tokens of a batch."""
        engines = {
            str(self.dtype).removeprefix("torch."): self.engine,
            INT8: Engine(random_backbone(self.config)[1], self.device, torch.float32, eight_bits=True),
        }
        return {name: {str(tokens): self._with_kernel(engine, tokens) for tokens in MIXED} for name, engine in engines.items()}

    def _with_kernel(self, engine: Engine, tokens: int) -> float:
        lengths = mixed_lengths(tokens)
        x = self._random(tokens, self.config.hidden).to(engine.dtype)
        runs = {
            name: partial(self._timed_layers, engine, x, PackedAttention(lengths, self.config.heads, compiled=name == "kernel"))
            for name in ("kernel", "torch")
        }
        return speeds_of(self._time(runs), "kernel")["torch"]

    def _timed_layers(self, engine: Engine, x: Tensor, attend: PackedAttention, _: int) -> float:
        return self._timed(lambda: engine.through(x, attend), len(x))

    def slots(self, rows: int) -> dict:
        """Measures full rows that are cut into more and more slots. Returns the speed-up over one slot a row."""
        lengths = filling(rows * ROW, VARIANCES[0])
        runs = {
            str(count): self._batches(Slotted(rows, ROW, ROW // count) if count > 1 else Concat(rows, ROW), [lengths])
            for count in SLOT_COUNTS
        }
        runs["packed"] = self._batches(Packed(), [lengths])
        timings = self._time(runs)
        return {name: round(timings["1"].median / timing.median, 3) for name, timing in timings.items()}

    def batch(self, texts: int) -> dict:
        batches = batches_of(texts, VARIANCES[-1])
        return rates(self._time({name: self._batches(packing, batches) for name, packing in self.packings.items()}))

    def masks(self) -> dict:
        """Measures attention alone with TCB's masks: within texts, causal, and from targets to sources of other lengths.

        Returns the targets' tokens a second. Queries, keys and values are random.
        """
        batches, sources = batches_of(TEXTS, VARIANCES[-1]), batches_of(TEXTS, VARIANCES[0])
        figures: dict = {"within": {}, "causal": {}, "cross": {}}
        for kind, rate in figures.items():
            runs = {name: self._attention(packing, kind, batches, sources) for name, packing in self.packings.items()}
            rate.update(rates(self._time(runs)))
        return figures | {
            "packed_to": {kind: round(rate["packed"] / rate["naive"], 3) for kind, rate in figures.items()},
            "causal_to_within": {name: round(figures["causal"][name] / rate, 3) for name, rate in figures["within"].items()},
        }

    def _attention(
        self, packing: Packing, kind: str, batches: list[np.ndarray], sources: list[np.ndarray]
    ) -> Callable[[int], float]:
        """Returns a function that runs the attention of one of the batches."""
        heads, device, dtype = self.config.heads, self.device, self.dtype
        ready = []
        for lengths, of_sources in zip(batches, sources, strict=True):
            calls = []
            for arrangement in packing.arrange(of_sources if kind == "cross" else lengths):
                targets = arrangement.beside(lengths)
                if kind == "cross":
                    attend = targets.cross_attention(arrangement, heads, device, dtype)
                else:
                    attend = targets.attention(heads, device, dtype, causal=kind == "causal")
                query = self._random(targets.rows, self.config.query_width)
                key, value = (self._random(arrangement.rows, self.config.key_width) for _ in range(2))
                calls.append(partial(attend, 0, query, key, value))
            ready.append((int(lengths.sum()), calls))

        def run(number: int) -> float:
            tokens, calls = ready[number % len(ready)]
            return self._timed(lambda: [call() for call in calls], tokens)

        return run

    def _time(self, runs: dict[str, Callable[[int], float]]) -> dict[str, Timing]:
        """Returns microseconds a token."""
        with torch.inference_mode():
            return alternate_timed(runs, self.seconds, warm_up=2)

    def _batches(
        self, packing: Packing, batches: list[np.ndarray], adapters: bool = False, first: bool = False
    ) -> Callable[[int], float]:
        """Returns a function that runs one of the batches.

        `adapters`: every text has an adapter. `first`: only first tokens are read, as for the task `classify`.
        """
        ready = []
        for lengths in batches:
            sheets = []
            for arrangement in packing.arrange(lengths):
                x = self._random(arrangement.rows, self.config.hidden)
                attend = arrangement.attention(self.config.heads, self.device, self.dtype)
                own = self.adapters(arrangement.texts, arrangement.rooms) if adapters else None
                sheets.append((x, attend, own, torch.from_numpy(arrangement.starts).to(self.device) if first else None))
            ready.append((int(lengths.sum()), sheets))

        def run(number: int) -> float:
            tokens, sheets = ready[number % len(ready)]
            return self._timed(lambda: [self.engine.through(*sheet) for sheet in sheets], tokens)

        return run

    def adapters(self, texts: np.ndarray, rooms: np.ndarray) -> list[Adapt]:
        """Returns adapters with which every text has another tenant than its neighbours."""
        layout = adapter_layout(self.config, "bottleneck", RANK)
        assert layout is not None
        layers = layout.allocate(TENANTS, self.device, self.dtype)
        for tensor in (tensor for weights in layers for tensor in weights.values()):
            tensor.copy_(self._random(*tensor.shape) * 0.02)
        groups = layout.group(np.repeat(texts % TENANTS, rooms), self.device, self.dtype)

        def of(weights: dict[str, Tensor]) -> Adapt:
            return lambda at, before, after: layout.adapt(at, before, after, groups, weights) if layout.touches(at) else after

        return [of(weights) for weights in layers]

    def _bare(self, tokens: int) -> Callable[[int], float]:
        wide, hidden = self.config.intermediate, self.config.hidden
        shapes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, wide), (wide, hidden))
        products = [(self._random(tokens, into), self._random(into, out)) for into, out in shapes]

        def run() -> None:
            for _ in range(self.config.upper_layers):
                for x, weight in products:
                    torch.mm(x, weight)

        return lambda _: self._timed(run, tokens)

    def _plain(self, texts: int, tokens: int) -> Callable[[int], float]:
        """Runs the layers of `transformers` on texts that need no mask."""
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertLayer

        config = BertConfig(
            hidden_size=self.config.hidden,
            num_attention_heads=self.config.heads,
            intermediate_size=self.config.intermediate,
        )
        config._attn_implementation = "sdpa"
        layers = [BertLayer(config).to(self.device, self.dtype).eval() for _ in range(self.config.upper_layers)]
        first = self._random(texts, tokens, self.config.hidden)

        def run() -> None:
            x = first
            for layer in layers:
                out = layer(x)
                x = out[0] if isinstance(out, tuple) else out

        return lambda _: self._timed(run, texts * tokens)

    def _timed(self, run: Callable[[], object], tokens: int) -> float:
        self._wait()
        start = self._clock()
        run()
        self._wait()
        return (self._clock() - start) / tokens

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(self.device, self.dtype)


def bench_engine(case: EngineBench) -> dict:
    device = resolve_device("auto")
    dtype = resolve_precision(case.dtype, device).dtype
    figures: dict = {}
    for size in case.sizes:
        print(f"measuring {size} on {device} in {dtype}", file=sys.stderr, flush=True)
        layers = MeasuredLayers(SIZES[size], device, dtype, case.seconds)
        figures[size.replace("-", "_")] = of_size = {}
        if device.type == "cpu":
            whole = OnnxWhole(SIZES[size], torch.get_num_threads()) if size == SWEPT and not missing_packages() else None
            of_size[INT8] = layers.eight_bits(whole)
        if case.only_int8:
            continue
        of_size |= {f"var{variance}": layers.packed(variance) for variance in VARIANCES}
        of_size["equal"] = {str(tokens): layers.equal(tokens) for tokens in EQUAL}
        of_size["one"] = {str(tokens): layers.one(tokens) for tokens in ONE}
        if device.type == "cpu":
            of_size["sizes"] = measure_sizes(SIZES[size], layers.engine, case.seconds)
            of_size["attention_kernel"] = layers.attention_kernel()
        if size == SWEPT:
            figures["slots"] = {str(rows): layers.slots(rows) for rows in SLOT_ROWS}
            figures["masks"] = layers.masks()
            figures["batch"] = {str(texts): layers.batch(texts) for texts in BATCH_SIZES}
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


def clock(device: torch.device) -> Callable[[], float]:
    """Returns the clock to use. One thread counts only its own time, so that other programs on its core do not count."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def batches_of(texts: int, variance: int) -> list[np.ndarray]:
    generator = np.random.default_rng(variance)
    return [lengths_of(texts, variance, generator) for _ in range(BATCHES)]


def lengths_of(texts: int, variance: int, generator: np.random.Generator) -> np.ndarray:
    return generator.normal(MEAN, variance**0.5, texts).round().clip(*CLIP).astype(np.int64)


def mixed_lengths(tokens: int) -> list[int]:
    """Returns lengths of texts with so many tokens together, the longest first."""
    generator, lengths = np.random.default_rng(tokens), list[int]()
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(int(generator.integers(*MIXED_LENGTHS)), left))
    return sorted(lengths, reverse=True)


def filling(tokens: int, variance: int) -> np.ndarray:
    """Returns the lengths of as many texts as fit into this number of tokens."""
    lengths = lengths_of(tokens // CLIP[0], variance, np.random.default_rng(variance))
    return lengths[np.cumsum(lengths) <= tokens]


def padding(packing: Packing, batches: list[np.ndarray]) -> float:
    """Returns the share of the computed rows that belong to no text."""
    rows = sum(arrangement.rows for lengths in batches for arrangement in packing.arrange(lengths))
    return 1 - sum(int(lengths.sum()) for lengths in batches) / rows


def rates(timings: dict[str, Timing]) -> dict:
    """Returns tokens a second."""
    return {name: round(1e6 / timing.median) for name, timing in timings.items()}


def ratios(timings: dict[str, Timing], base: str) -> dict:
    """Returns ratios of the medians, and of the fastest rounds, which other work on the machine disturbs least."""
    others = [name for name in timings if name != base]
    return {name: round(timings[base].median / timings[name].median, 3) for name in others} | {
        f"{name}_least": round(timings[base].least / timings[name].least, 3) for name in others
    }


def speeds_of(timings: dict[str, Timing], fast: str) -> dict:
    """Returns how many times as fast one is as each of the others, as `ratios`."""
    others = [name for name in timings if name != fast]
    return {name: round(timings[name].median / timings[fast].median, 3) for name in others} | {
        f"{name}_least": round(timings[name].least / timings[fast].least, 3) for name in others
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
