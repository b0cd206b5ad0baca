"""`hplm bench plot`: the time of a lookup in a table, beside the layers that the table replaces.

Keys are the most frequent n-grams of a corpus whose words follow Zipf's law. Texts are new ones of the same distribution. All
is measured on one thread, and a text at a time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from bench.cold import Cold, can_drop
from bench.rows import Dtype, Positive, Row, Rows, Whole, benchmark
from bench.turns import alternate, stolen, threads
from hplm.engine.engine import resolve_dtype
from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention
from hplm.model.config import BackboneConfig
from hplm.model.layer import Layer
from hplm.model.windows import Window
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.gathering import Gatherer
from hplm.plot.kernel import kernel
from hplm.plot.keys import KeySpace
from hplm.plot.levels import count_levels, ends
from hplm.plot.table import Table, TableSpec
from hplm.plot.writing import BATCH, write_table
from testing.random_store import BERT_BASE, random_documents, ranked_keys

CPU = torch.device("cpu")
COMPARED = ("fp16", "int8")
TEXTS = 256  # together they read more rows than the CPU's caches hold
LONGEST_DOCUMENT = 512
VERSION = 1


@benchmark(keys=3000, hidden=32, tokens=16, seconds=0.01)
def plot(
    *,
    keys: Whole = 1_000_000,
    window: Whole = 3,
    hidden: Whole = 768,
    tokens: Whole = 128,
    seconds: Positive = 3.0,
    folder: Path | None = None,
    dtype: Dtype = "auto",
) -> Rows:
    """Writes tables of random values with realistic keys, and looks texts up in them.

    Beside a lookup are the layers that a table replaces, and the floors: reading as many consecutive rows (`sequential`), and
    reading the same rows from the disk with as many threads as are fastest (`pread`). A million keys of width 768 take 4 GB of
    disk and some minutes.

    :param keys: n-grams in the table
    :param window: tokens of an n-gram
    :param hidden: width of a vector
    :param tokens: of a text
    :param seconds: for each figure
    :param folder: on a disk, in which the tables are kept for the next run
    :param dtype: of the layers that the table replaces
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hplm-bench-", dir=folder) as scratch, stolen() as share, threads(1):
        made = Tables(folder if folder is not None else Path(scratch), keys, window, hidden)
        forests = {name: made.forest(name) for name in COMPARED}
        texts = random_documents(made.config, TEXTS * tokens, tokens, seed=11)
        lengths, chain = np.array([tokens]), forests["fp16"].chain("fp16", VERSION)
        found = [chain.lookup(text, lengths) for text in texts]
        addresses = [hits.addresses for hits in found]
        # First, because a file that is mapped into memory cannot be dropped from it.
        cold, pread_threads = Cold(made.path("fp16"), lambda: made.forest("fp16"), addresses, lengths).measure(seconds)
        timings = cold | alternate(_warm(forests, texts, addresses, lengths), seconds, warm_up=TEXTS)
        precision = resolve_dtype(dtype, CPU)
        timings |= alternate({"lower_stack": _lower_stack(made.config, tokens, precision)}, seconds)
        levels = sum((count_levels(chain, ends(chain, hits)) for hits in found), Counter())
    for name, timing in timings.items():
        yield Row(f"{name}_us", timing.median, "us")
        yield Row(f"{name}_p90_us", timing.p90, "us")
    both = timings["lookup"].median + timings["gather"].median
    yield Row("lookup_plus_gather_us", both, "us", most=130)
    yield Row("ratio", both / timings["lower_stack"].median, most=0.005)
    yield Row("gather_to_sequential", timings["gather"].median / timings["sequential"].median)
    yield Row("both_to_sequential", both / timings["sequential"].median, most=1.5)
    yield Row("int8_to_gather", timings["int8_gather"].median / timings["gather"].median, most=0.6)
    yield Row("cold_to_pread", timings["cold"].median / timings["pread"].median, most=1.3)
    yield Row("pread_threads", pread_threads)
    for name, count in levels.items():
        yield Row(f"found/{name}", count / (len(texts) * tokens))
    yield Row("dtype", str(precision).removeprefix("torch."))
    yield Row("compiled_kernel", kernel() is not None)
    yield Row("stolen_share", share())


class Tables:
    """A table for each way to store a vector, with the same rows. Tables that the folder already has are used."""

    def __init__(self, folder: Path, keys: int, window: int, hidden: int) -> None:
        heads = hidden // 64 if hidden % 64 == 0 else 1
        self.config = replace(BERT_BASE, hidden=hidden, heads=heads, intermediate=4 * hidden, window=Window(window))
        self._folder, self._keys = folder, keys
        if not can_drop(folder):
            raise InvalidInput(f"files in {folder} cannot be dropped from memory: choose a --folder on a disk")
        missing = [name for name in COMPARED if not self._fits(name)]
        self._expect_space(missing)
        if missing:
            rows = self._ranked_keys()
            pool = torch.randn(BATCH, window, hidden, generator=torch.Generator().manual_seed(5))
            for name in missing:
                shutil.rmtree(folder / name, ignore_errors=True)
                with tqdm(total=len(rows), desc=f"writing the {name} table", unit="n-gram", unit_scale=True) as bar:
                    # The same few thousand rows are repeated: the measured time depends on their places, not on their values.
                    write_table(
                        self.path(name), self._spec(name), rows, lambda windows: pool[: len(windows)], progress=bar.update
                    )

    def path(self, name: str) -> Path:
        return self._folder / name / str(VERSION)

    def forest(self, name: str) -> Forest:
        return Forest([self._folder], assign_addresses([Table(self.path(name))]))

    def _spec(self, name: str) -> TableSpec:
        config = self.config
        return TableSpec(
            domain=name, version=VERSION, parent=None, parent_version=None, n=config.window.n, causal=config.window.causal,
            vocabulary=config.vocabulary, hidden=config.hidden, dtype=name, corpus_tokens=4 * self._keys,
        )  # fmt: skip

    def _ranked_keys(self) -> np.ndarray:
        """Returns the most frequent n-grams of a Zipf corpus, ranked as by the builder, and then the remaining tokens."""
        vocabulary, space = self.config.vocabulary, KeySpace(self.config.vocabulary, self.config.window)
        ranked = ranked_keys(random_documents(self.config, 4 * self._keys, LONGEST_DOCUMENT, seed=7), space, root=True)
        if len(ranked) < self._keys:
            raise InvalidInput(
                f"a vocabulary of {vocabulary} has too few n-grams for a table of {self._keys}: give fewer --keys"
            )
        chosen, missing = ranked[: self._keys], np.ones(vocabulary, dtype=bool)
        alone = chosen[((chosen & space.masks[-1]) == chosen).all(1)]
        missing[space.unpack(alone)[:, space.window.centre] - 1] = False
        return np.concatenate([chosen, space.unigrams()[missing]])

    def _fits(self, name: str) -> bool:
        path, config = self.path(name), self.config
        if not path.exists():
            return False
        meta = Table(path).meta
        is_size = self._keys <= meta.keys <= self._keys + config.vocabulary
        if not is_size or (meta.hidden, meta.n) != (config.hidden, config.window.n):
            held = f"{meta.keys:,} {meta.n}-grams of width {meta.hidden}"
            raise InvalidInput(f"{path} holds {held}: remove it, or choose another --folder")
        return True

    def _expect_space(self, missing: list[str]) -> None:
        needed = sum((self._keys + self.config.vocabulary + 1) * self._spec(name).row_bytes for name in missing)
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise InvalidInput(
                f"the benchmark needs {needed / 1e9:.1f} GB in {self._folder}, where {free / 1e9:.1f} GB are free: "
                "free some space, choose another --folder, or give fewer --keys"
            )


def _warm(
    forests: dict[str, Forest], texts: list[np.ndarray], addresses: list[np.ndarray], lengths: np.ndarray
) -> dict[str, Callable[[int], object]]:
    forest, int8, gatherer = forests["fp16"], forests["int8"], Gatherer(CPU, torch.bfloat16)
    chain = forest.chain("fp16", VERSION)
    table = chain.links[0][0]
    vectors, run = table.meta.window.vectors, min(int(lengths[0]), table.size)
    starts = np.random.default_rng(3).integers(0, table.size - run + 1, TEXTS).tolist()
    consecutive = [torch.arange(start * vectors, (start + run) * vectors).view(run, vectors) for start in starts]
    for number, start in enumerate(starts):
        table.rows.touch(np.arange(start, start + run))
        gatherer.broken(int8, addresses[number])
        gatherer.broken(forest, addresses[number])
    return {
        "lookup": lambda text: chain.lookup(texts[text % TEXTS], lengths),
        "gather": lambda text: gatherer.sums(forest, addresses[text % TEXTS], lengths),
        "sequential": lambda text: table.rows.bags(consecutive[text % TEXTS], torch.bfloat16),  # by torch
        "int8_gather": lambda text: gatherer.sums(int8, addresses[text % TEXTS], lengths),
    }


def _lower_stack(config: BackboneConfig, tokens: int, dtype: torch.dtype) -> Callable[[int], None]:
    """Returns the layers that the table replaces, on one text."""
    attend = PackedAttention([tokens], config.heads)
    layers = nn.ModuleList(Layer(config) for _ in range(config.lower_layers)).to(dtype).eval()
    x = torch.randn(tokens, config.hidden, dtype=dtype)

    @torch.inference_mode()
    def run(_: int) -> None:
        hidden = x
        for layer in layers:
            hidden = layer(hidden, attend)

    return run
