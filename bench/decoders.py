"""Decoders with random weights, and a loop that a benchmark drives step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from tqdm import tqdm

from hplm.adapters import records
from hplm.adapters.layout import adapter_layout
from hplm.errors import HplmError
from hplm.generation.cache import Cache
from hplm.generation.decoder import Decoder
from hplm.generation.loop import Loop
from hplm.generation.queue import SequenceQueue
from hplm.generation.request import Piece, Request, Source
from hplm.generation.request import Sequence as Answer
from hplm.generation.running import Running
from hplm.generation.sampling import Sampling
from hplm.generation.staging import Stager
from hplm.model.config import RMS, UNUSED, BackboneConfig
from hplm.model.stacks import UpperStack
from hplm.model.windows import Window
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.table import TableSpec
from hplm.plot.writing import write_table
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from testing.random_store import random_values

CPU = torch.device("cpu")
START = 1
LEAST, MEAN, MOST = 8, 40, 128  # generated tokens, geometrically distributed between the first and the last
STEP_TOKENS, CACHE_TOKENS = 256, 16_384
GRAMS = 100_000  # of the table of an hGPT
RANK = 4
SHAPES = {"smollm2": (49_152, 576, 9, 1536, 3), "toy": (512, 64, 4, 128, 2)}  # vocabulary, hidden, heads, inner, heads of keys


class Model:
    """A decoder with random weights, and its table."""

    def __init__(self, folder: Path, size: str, layers: int, lower: int) -> None:
        """`size`: one of `SHAPES`. `lower`: those of the layers that the table replaces."""
        vocabulary, hidden, heads, inner, kv_heads = SHAPES[size]
        self.config = config = BackboneConfig(
            size, vocabulary, hidden, heads, inner, lower, layers - lower, 2048, 0, "silu", 1e-5, UNUSED, UNUSED, UNUSED,
            UNUSED, Window(3 if lower else 1, causal=True), kv_heads=kv_heads, norm=RMS, pre_norm=True, biases=False,
            gated=True, rotary_base=100_000.0, start_id=START,
        )  # fmt: skip
        torch.manual_seed(lower)
        self.upper = UpperStack(config)
        spec = TableSpec(
            domain="root", version=1, parent=None, parent_version=None, n=config.window.n, causal=True,
            vocabulary=config.vocabulary, hidden=config.hidden, dtype="fp16", corpus_tokens=0,
        )  # fmt: skip
        keys = spec.space.unigrams()
        if lower:
            grams = np.random.default_rng(0).integers(1, config.vocabulary + 1, (GRAMS, config.window.n))
            keys = np.concatenate([keys, np.unique(spec.space.pack(grams), axis=0)])
        table = write_table(folder / f"{lower}" / "root" / "1", spec, keys, random_values(spec, 0))
        self.forest = Forest([folder / f"{lower}"], assign_addresses([table]))
        self.source = Source("bench", 1, 1, self.forest.chain("root", 1))
        self.folder = folder

    def tenants(self, count: int) -> list[Source]:
        """Returns tenants with LoRAs of their own."""
        layout = adapter_layout(self.config, "lora", RANK, ("query", "value"))
        assert layout is not None
        pool = torch.randn(layout.layers * layout.layer_size + 8 * count) * 0.02
        size = layout.layers * layout.layer_size
        flat = (pool[8 * i : 8 * i + size].view(layout.layers, -1) for i in range(count))
        made = [records.write(self.folder, records.pack({"adapter": (layout, layout.unpack(one))}))["adapter"] for one in flat]
        return [replace(self.source, uid=i, adapter=record) for i, record in enumerate(made)]


class Bench:
    """A loop that one thread drives."""

    def __init__(self, model: Model, seats: int = 16) -> None:
        config = model.config
        self.model = model
        cache = Cache(CACHE_TOKENS, config.positions, config.upper_layers, config.key_width, CPU)
        self.queue = SequenceQueue(policy("timely"), Limits(100_000, 10**10), cache.size_for, False)
        self.stager = Stager(config, lambda: model.forest, set, records.Records(model.folder), cache, seats)
        decoder = Decoder(model.upper, CPU, torch.float32)
        self.running = Running(cache, seats, STEP_TOKENS, finished=0)  # rounds have the same prompts
        self.loop = Loop(self.queue, self.running, self.stager, decoder, ())

    def ask(self, prompt: Sequence[int], count: int, source: Source | None = None) -> None:
        source = source or self.model.source
        ids = [START, *prompt]
        addresses = source.chain.lookup(np.array(ids), np.array([len(ids)])).addresses
        sampling = Sampling(temperature=0, max_tokens=count, logprobs=None)
        request = Request(source, ids, addresses, sampling, _take, _decode, arrival_ns=time.monotonic_ns(), seed=0)
        self.loop.offer(Answer(request))

    def answer(self, prompts: Sequence[Sequence[int]], counts: Sequence[int], sources: Iterable[Source | None]) -> float:
        """Answers prompts with so many tokens each. Returns the tokens a second."""
        for prompt, count, source in zip(prompts, counts, sources, strict=False):
            self.ask(prompt, count, source)
        return sum(counts) / self.run()

    def run(self) -> float:
        """Answers all requests. Returns how long it took."""
        start = time.perf_counter()
        while self.loop.step() or len(self.running) or len(self.queue):
            pass
        return time.perf_counter() - start


def _take(piece: Piece | HplmError) -> None:
    if isinstance(piece, HplmError):
        raise piece


def _decode(ids: Sequence[int]) -> str:
    """Turns each token into a character. Tokenizers differ, and none is measured here."""
    return "".join(chr(0x4E00 + id % 20_000) for id in ids)


def prompts_of(model: Model, count: int, tokens: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(2, model.config.vocabulary, (count, tokens)).tolist()


def lengths_of(count: int, seed: int = 0) -> list[int]:
    """Returns geometrically distributed numbers of tokens."""
    drawn = LEAST + np.random.default_rng(seed).geometric(1 / (MEAN - LEAST), count)
    return np.minimum(drawn, MOST).tolist()


def in_turn(variants: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Returns the median of what each variant returns. The first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for turn in tqdm(range(rounds + 1), desc=" and ".join(variants)):
        for name, variant in variants.items():
            value = variant()
            if turn:
                found[name].append(value)
    return {name: median(values) for name, values in found.items()}
