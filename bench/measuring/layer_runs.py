"""Runs of the engine's shared layers and of what they are compared with, timed in turn in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bench.tools.timing import Timing, alternate_timed
from hplm.adapters.layout import adapter_layout
from hplm.engine.engine import Engine
from hplm.engine.packing import Packing
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import random_backbone
from hplm.model.config import BackboneConfig
from hplm.model.layer import Adapt

TENANTS, RANK = 16, 32

Run = Callable[[int], float]  # runs the batch of this number, and returns its time, in seconds a token


class LayerRuns:
    """The shared upper layers of one size, on one device, in one precision."""

    def __init__(self, config: BackboneConfig, device: torch.device, dtype: torch.dtype, seconds: float) -> None:
        """`seconds`: for each run that is timed."""
        self.config = config
        self.device = device
        self.dtype = dtype
        self.engine = Engine(random_backbone(config)[1], device, dtype)
        self._seconds = seconds
        self._clock = clock(device)

    def time(self, runs: dict[str, Run]) -> dict[str, Timing]:
        """Returns microseconds a token."""
        with torch.inference_mode():
            return alternate_timed(runs, self._seconds, warm_up=2)

    def batches(self, packing: Packing, batches: list[np.ndarray], adapters: bool = False, first: bool = False) -> Run:
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

    def attention(self, packing: Packing, kind: str, batches: list[np.ndarray], sources: list[np.ndarray]) -> Run:
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

    def bare(self, tokens: int) -> Run:
        """Returns a function that runs bare matrix products of the same shapes."""
        wide, hidden = self.config.intermediate, self.config.hidden
        shapes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, wide), (wide, hidden))
        products = [(self._random(tokens, into), self._random(into, out)) for into, out in shapes]

        def run() -> None:
            for _ in range(self.config.upper_layers):
                for x, weight in products:
                    torch.mm(x, weight)

        return self.timed(run, tokens)

    def plain(self, texts: int, tokens: int) -> Run:
        """Returns a function that runs the layers of `transformers` on texts that need no mask."""
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

        return self.timed(run, texts * tokens)

    def layers(self, engine: Engine, attend: PackedAttention, tokens: int) -> Run:
        """Returns a function that runs the layers of another engine over packed texts with so many tokens together."""
        x = self._random(tokens, self.config.hidden).to(engine.dtype)
        return self.timed(lambda: engine.through(x, attend), tokens)

    def timed(self, run: Callable[[], object], tokens: int) -> Run:
        """Returns a function that runs the same each time."""
        return lambda _: self._timed(run, tokens)

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
