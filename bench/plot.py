"""`hplm bench plot`: the time of a lookup in a table, beside the layers that the table replaces.

Keys are the most frequent n-grams of a corpus whose words follow Zipf's law. Texts are new ones of the same distribution. All
is measured on one thread, and a text at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from bench.rows import ONLY_QUICK, Positive, Row, Rows, Whole, benchmark
from bench.server import expect_room
from bench.turns import alternate, threads
from builder.store.branches import table_spec
from hplm.compiled import kernel
from hplm.engine.engine import resolve_dtype
from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention
from hplm.model.config import BackboneConfig
from hplm.model.layer import Layer
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.gathering import Gatherer
from hplm.plot.keys import KeySpace
from hplm.plot.rows import CODINGS
from hplm.plot.table import Table
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
    hidden: Annotated[int, ONLY_QUICK] = 768,
    tokens: Annotated[int, ONLY_QUICK] = 128,
    seconds: Positive = 3.0,
) -> Rows:
    """Writes tables of random values with realistic keys, and looks texts up in them.

    Beside a lookup are the layers that a table replaces, and the floor: reading as many consecutive rows (`sequential`). A
    million keys of width 768 take 4 GB of disk and some minutes.

    :param keys: n-grams in the table
    :param seconds: for each figure
    """
    heads = hidden // 64 if hidden % 64 == 0 else 1
    config = replace(BERT_BASE, hidden=hidden, heads=heads, intermediate=4 * hidden)
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as scratch, threads(1):
        tables = Path(scratch)
        write_tables(tables, config, keys)
        forests = {name: Forest([tables], assign_addresses([Table(_path(tables, name))])) for name in COMPARED}
        texts = random_documents(config, TEXTS * tokens, tokens, seed=11)
        lengths, chain = np.array([tokens]), forests["fp16"].chain("fp16", VERSION)
        addresses = [chain.lookup(text, lengths).addresses for text in texts]
        median = alternate(_warm(forests, texts, addresses, lengths), seconds, warm_up=TEXTS)
        precision = resolve_dtype("auto", CPU)
        median |= alternate({"lower_stack": _lower_stack(config, tokens, precision)}, seconds)
    for name, taken in median.items():
        yield Row(f"{name}_us", taken, "us")
    both = median["lookup"] + median["gather"]
    yield Row("lookup_plus_gather_us", both, "us", most=130)
    yield Row("ratio", both / median["lower_stack"], most=0.005)
    yield Row("both_to_sequential", both / median["sequential"], most=1.5)
    yield Row("int8_to_gather", median["int8_gather"] / median["gather"], most=0.6)
    yield Row("dtype", str(precision).removeprefix("torch."))
    yield Row("compiled_kernel", kernel() is not None)


def write_tables(folder: Path, config: BackboneConfig, keys: int) -> None:
    """Writes a table for each way to store a vector, with the same rows."""
    specs = {name: table_spec(config, name, VERSION, None, name, corpus_tokens=4 * keys) for name in COMPARED}
    needed = sum((keys + config.vocabulary + 1) * spec.row_bytes for spec in specs.values())
    expect_room(folder, needed, "the tables need", "set TMPDIR to a folder with more space, or give fewer --keys")
    rows = _ranked_keys(config, keys)
    pool = torch.randn(BATCH, config.window.n, config.hidden, generator=torch.Generator().manual_seed(5))
    for name, spec in specs.items():
        with tqdm(total=len(rows), desc=f"writing the {name} table", unit="n-gram", unit_scale=True) as bar:
            # The same few thousand rows are repeated: the measured time depends on their places, not on their values.
            write_table(_path(folder, name), spec, rows, lambda windows: pool[: len(windows)], progress=bar.update)


def _ranked_keys(config: BackboneConfig, keys: int) -> np.ndarray:
    """Returns the most frequent n-grams of a Zipf corpus, ranked as by the builder, and then the remaining tokens."""
    space = KeySpace(config.vocabulary, config.window)
    ranked = ranked_keys(random_documents(config, 4 * keys, LONGEST_DOCUMENT, seed=7), space, root=True)
    if len(ranked) < keys:
        raise InvalidInput(f"a vocabulary of {config.vocabulary} has too few n-grams for a table of {keys}: give fewer --keys")
    both = np.concatenate([ranked[:keys], space.unigrams()])
    return both[np.sort(np.unique(both, axis=0, return_index=True)[1])]


def _path(folder: Path, name: str) -> Path:
    return folder / name / str(VERSION)


def _warm(
    forests: dict[str, Forest], texts: list[np.ndarray], addresses: list[np.ndarray], lengths: np.ndarray
) -> dict[str, Callable[[int], object]]:
    forest, int8, gatherer = forests["fp16"], forests["int8"], Gatherer(CPU, torch.bfloat16)
    chain = forest.chain("fp16", VERSION)
    table = chain.links[0][0]
    rows, coding, vectors, run = (
        table.rows,
        CODINGS[table.meta.dtype],
        table.meta.window.vectors,
        min(int(lengths[0]), table.size),
    )
    starts = np.random.default_rng(3).integers(0, table.size - run + 1, TEXTS).tolist()
    consecutive = [torch.arange(start * vectors, (start + run) * vectors).view(run, vectors) for start in starts]
    for number, start in enumerate(starts):
        rows.touch(np.arange(start, start + run))
        gatherer.broken(int8, addresses[number])
        gatherer.broken(forest, addresses[number])
    return {
        "lookup": lambda text: chain.lookup(texts[text % TEXTS], lengths),
        "gather": lambda text: gatherer.sums(forest, addresses[text % TEXTS], lengths),
        "sequential": lambda text: coding.bags(rows.typed, consecutive[text % TEXTS], torch.bfloat16),  # by torch
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
