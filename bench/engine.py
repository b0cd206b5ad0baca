"""`hplm bench engine`: packed batches beside padded ones, 8 bits beside fp32, and the engine beside bare matrix products.

All variants of a figure take turns in one process. Lengths of texts are as in TCB 6.1: normal, mean 20, variance 20 or 100, 3
to 100. `hplm bench overload --packings` compares packings on a server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from bench.rows import ONLY_QUICK, Dtype, Positive, Row, Rows, Size, benchmark, say
from bench.turns import alternate
from hplm.engine.engine import INT8, Engine, resolve_device, resolve_precision
from hplm.engine.packing import Arrangement, end_to_end, read_packing
from hplm.model.config import BackboneConfig
from hplm.model.layer import Attend
from hplm.simulate.arrivals import Lengths
from testing.random_store import SIZES, bert_config, modernbert_config, random_backbone

TEXTS, BATCHES = 64, 4  # of a batch; different batches, run in turn
MEAN, VARIANCES = 20, (20, 100)
EQUAL = (20, 128)  # lengths compared with bare products
ONE = 128  # tokens of a batch of one
EIGHT_BITS, EIGHT_BITS_TOKENS = {"one": 1, "batch": 10}, 128  # texts of a batch, and tokens of a text

Lay = Callable[[np.ndarray], list[Arrangement]]  # puts texts of these lengths into tensors

Run = Callable[[int], float]  # runs the batch of this number, and returns its time, in seconds a token


@benchmark(size=("toy",), seconds=0.01, dtype="fp32")
def engine(
    *,
    size: tuple[Size, ...] = ("minilm", "bert-base"),
    seconds: Positive = 3.0,
    dtype: Annotated[Dtype, ONLY_QUICK] = "auto",
) -> Rows:
    """Measures the shared upper layers: tokens a second of each packing, and ratios of the variants.

    `to_uniform`: of texts of one length. `share_of_bare`: of bare matrix products of the same shapes. `to_plain`: over the
    layers of `transformers`.

    :param size: of the model, one or several
    :param seconds: for each figure
    """
    device = resolve_device("auto")
    precision = resolve_precision(dtype, device).dtype
    eight_bits = []
    for name in size:
        say(f"measuring {name} on {device} in {precision}")
        runs, at = LayerRuns(SIZES[name], device, precision, seconds), name.replace("-", "_")
        for variance in VARIANCES if runs.config.near is None else ():  # other packings know no near tokens
            yield from _packings(runs, variance, f"{at}/var{variance}")
        for tokens in EQUAL:
            lengths = np.full(1280 // tokens, tokens)
            timings = runs.time({"engine": runs.batches(packed, [lengths]), "bare": runs.bare(int(lengths.sum()))})
            yield from _rates(f"{at}/equal/{tokens}", timings)
            yield Row(f"{at}/equal/{tokens}/share_of_bare", timings["bare"] / timings["engine"])
        timings = runs.time({"engine": runs.batches(packed, [np.array([ONE])]), "transformers": runs.plain(1, ONE)})
        for variant, took in timings.items():
            yield Row(f"{at}/one/{ONE}/{variant}_ms", took * ONE / 1e3, "ms")
        yield Row(f"{at}/one/{ONE}/to_plain", timings["transformers"] / timings["engine"])
        if device.type == "cpu":
            for row in _eight_bits(runs, f"{at}/{INT8}"):
                eight_bits += [row.value] if row.name.endswith("int8_over_fp32") else []
                yield row
    if eight_bits:
        yield Row("int8_over_fp32", min(eight_bits))  # the least of all sizes, for one text and a batch
    yield Row("dtype", str(precision).removeprefix("torch."))
    yield Row("device", device.type)
    yield Row("threads", torch.get_num_threads())


def _packings(runs: LayerRuns, variance: int, at: str) -> Rows:
    """`uniform` is the same number of tokens in texts of one length: no packing can beat it."""
    generator = np.random.default_rng(variance)
    batches = [Lengths(MEAN, variance).draw(TEXTS, generator) for _ in range(BATCHES)]
    equal = [np.full(TEXTS, round(int(lengths.sum()) / TEXTS)) for lengths in batches]
    naive = read_packing("naive", runs.engine.seconds)
    assert naive is not None
    timings = runs.time(
        {
            "packed": runs.batches(packed, batches),
            "naive": runs.batches(naive.lay, batches),
            "uniform": runs.batches(packed, equal),
        }
    )
    yield from _rates(at, timings)
    yield Row(f"{at}/to_uniform/packed", timings["uniform"] / timings["packed"])
    yield Row(f"{at}/packed_to/naive", timings["naive"] / timings["packed"])


def packed(lengths: np.ndarray) -> list[Arrangement]:
    return [end_to_end(lengths)]


def _eight_bits(runs: LayerRuns, at: str) -> Rows:
    ways = {name: LayerRuns(runs.config, runs.device, torch.float32, runs.seconds, name == INT8) for name in ("fp32", INT8)}
    for batch, texts in EIGHT_BITS.items():
        lengths = np.full(texts, EIGHT_BITS_TOKENS)
        timings = runs.time({name: way.batches(packed, [lengths]) for name, way in ways.items()})
        for name, took in timings.items():
            yield Row(f"{at}/{batch}/{name}_ms", took * int(lengths.sum()) / 1e3, "ms")
        yield Row(f"{at}/{batch}/int8_over_fp32", timings["fp32"] / timings[INT8])


def _rates(at: str, timings: dict[str, float]) -> Rows:
    for name, took in timings.items():
        yield Row(f"{at}/{name}", 1e6 / took, "tokens/s")


class LayerRuns:
    """The shared upper layers of one size, on one device, in one precision."""

    def __init__(
        self, config: BackboneConfig, device: torch.device, dtype: torch.dtype, seconds: float, eight_bits: bool = False
    ) -> None:
        """`seconds`: for each run that is timed."""
        self.config, self.device, self.dtype, self.seconds = config, device, dtype, seconds
        self.engine = Engine(random_backbone(config)[1], device, dtype, eight_bits)
        self._clock = clock(device)

    def time(self, runs: dict[str, Run]) -> dict[str, float]:
        """Returns microseconds a token."""
        with torch.inference_mode():
            return alternate(runs, self.seconds, warm_up=2)

    def batches(self, lay: Lay, batches: list[np.ndarray]) -> Run:
        """Returns a function that runs one of the batches."""

        def sheet(laid: Arrangement) -> tuple[Tensor, Attend, Tensor]:
            positions = torch.zeros(laid.rows, dtype=torch.int64)
            positions[torch.from_numpy(laid.tokens)] = torch.from_numpy(laid.offsets)
            attend = laid.attention(self.config.heads, self.device, self.dtype)
            return self._random(laid.rows, self.config.hidden), attend, positions.to(self.device)

        ready = [(int(lengths.sum()), [sheet(laid) for laid in lay(lengths)]) for lengths in batches]

        def run(number: int) -> float:
            tokens, sheets = ready[number % len(ready)]
            return self._timed(lambda: [self.engine.through(*sheet) for sheet in sheets], tokens)

        return run

    def bare(self, tokens: int) -> Run:
        """Returns a function that runs bare matrix products of the same shapes."""
        wide, hidden = self.config.intermediate, self.config.hidden
        shapes = (hidden, 3 * hidden), (hidden, hidden), (hidden, (1 + self.config.gated) * wide), (wide, hidden)
        products = [(self._random(tokens, into), self._random(into, out)) for into, out in shapes]

        def run() -> None:
            for _ in range(self.config.upper_layers):
                for x, weight in products:
                    torch.mm(x, weight)

        return lambda _: self._timed(run, tokens)

    def plain(self, texts: int, tokens: int) -> Run:
        """Returns a function that runs the layers of `transformers` on texts that need no mask of padding."""
        if self.config.near is not None:
            return self._plain_modernbert(texts, tokens)
        from transformers.models.bert.modeling_bert import BertLayer

        config = bert_config(self.config)
        config._attn_implementation = "sdpa"
        layers = [BertLayer(config).to(self.device, self.dtype).eval() for _ in range(self.config.upper_layers)]
        first = self._random(texts, tokens, self.config.hidden)

        def run() -> None:
            x = first
            for layer in layers:
                out = layer(x)
                x = out[0] if isinstance(out, tuple) else out

        return lambda _: self._timed(run, texts * tokens)

    def _plain_modernbert(self, texts: int, tokens: int) -> Run:
        from transformers.models.modernbert.modeling_modernbert import ModernBertEncoderLayer, ModernBertRotaryEmbedding

        config, below = modernbert_config(self.config), self.config.lower_layers
        config._attn_implementation = "sdpa"
        layers = [
            ModernBertEncoderLayer(config, below + number).to(self.device, self.dtype).eval()
            for number in range(self.config.upper_layers)
        ]
        turns, first = ModernBertRotaryEmbedding(config, self.device), self._random(texts, tokens, self.config.hidden)
        places = torch.arange(tokens, device=self.device)
        sees = (places[:, None] - places).abs() <= config.sliding_window
        masks = {"full_attention": None, "sliding_attention": sees.expand(texts, 1, -1, -1)}

        def run() -> None:
            x, turned = first, {kind: turns(first, places[None], kind) for kind in masks}
            for layer in layers:
                kind = layer.attention_type
                x = layer(x, attention_mask=masks[kind], position_embeddings=turned[kind])

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


def clock(device: torch.device) -> Callable[[], float]:
    """Returns the clock to use. One thread counts only its own time, so that other programs on its core do not count."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
