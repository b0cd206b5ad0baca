"""Times a table on one thread: looking up and gathering one text, beside the layers that the table replaces.

Keys are the most frequent n-grams of a corpus whose words follow Zipf's law. Texts are new ones of the same distribution.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bench.measuring.cold import Cold, can_drop
from bench.measuring.counting import count_apart
from bench.measuring.plot_tables import TEXTS, VERSION, config_of, fresh_texts, space_of, spec_of, tables, write_corpus
from bench.plot import PlotBench
from bench.tools.machine import cpu_name
from bench.tools.timing import Timing, alternate, cpu_ticks, threads
from hplm.engine.engine import resolve_dtype
from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import random_backbone
from hplm.model.layer import Layer
from hplm.plot.forest import Forest
from hplm.plot.gathering import Gatherer
from hplm.plot.index import Index, write_index
from hplm.plot.kernel import kernel
from hplm.plot.levels import count_levels, ends
from hplm.plot.writing import BATCH, write_table

CPU = torch.device("cpu")
MORE = 10  # the larger index has so many times as many keys, and should not be slower
INDEX_TEXTS = 4096  # together they touch more of the larger index than the CPU's caches hold
TARGETS = {  # upper limits; negative numbers: lower limits
    "lookup_plus_gather_us": 130,
    "ratio": 0.005,
    "both_to_sequential": 1.5,
    "int8_to_gather": 0.6,
    "keys_10m_to_1m": 1.4,
    "cold_to_pread": 1.3,
    "build_to_forward": -0.8,
}


def bench_plot(case: PlotBench, folder: Path | None = None) -> dict:
    """Measures everything. If `folder` is given, the tables are kept there and used again."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hplm-bench-", dir=folder) as scratch:
        home = folder if folder is not None else Path(scratch)
        if not can_drop(home):
            raise InvalidInput(f"files in {home} cannot be dropped from memory: choose a --folder on a disk")
        figures: dict = {}
        spread: dict[str, Timing] = {}
        forests = tables(case, home)
        ticks, stolen = cpu_ticks()
        with threads(1):
            texts, lengths = fresh_texts(case), np.array([case.tokens])
            chain = forests["fp16"].chain("fp16", VERSION)
            found = [chain.lookup(text, lengths) for text in texts]
            addresses = [hits.addresses for hits in found]
            levels = sum((count_levels(chain, ends(chain, hits)) for hits in found), Counter())
            # First, because a file that is mapped into memory cannot be dropped from it.
            cold, figures["pread_threads"] = Cold(home, "fp16", addresses, lengths).measure(case.seconds)
            spread |= cold | _warm(case, forests, texts, addresses, lengths)
            spread |= _lower_layers(case) | _index(case, Path(scratch))
        figures |= _building(case, Path(scratch))
        now, stolen_now = cpu_ticks()
        figures["stolen_share"] = round((stolen_now - stolen) / max(1, now - ticks), 4)
        if case.count_tokens:
            write_corpus(Path(scratch) / "corpus", case)
            figures |= count_apart(Path(scratch) / "corpus", space_of(case), Path(scratch) / "counts")
    figures = {f"{name}_us": round(timing.median, 2) for name, timing in spread.items()} | figures
    dtype = str(resolve_dtype(case.dtype, CPU)).removeprefix("torch.")
    figures["lower_stack_us"] = figures[f"lower_stack_{dtype}_us"]
    return {
        **figures,
        **_ratios(figures),
        "found": {name: round(count / (len(texts) * case.tokens), 4) for name, count in levels.items()},
        "spread_us": {name: {k: round(v, 2) for k, v in asdict(timing).items()} for name, timing in spread.items()},
        "case": asdict(case),
        "dtype": dtype,
        "compiled_kernel": kernel() is not None,
        "threads": 1,
        "build_threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "torch": torch.__version__,
    }


def _ratios(figures: dict) -> dict[str, float]:
    both = figures["lookup_us"] + figures["gather_us"]
    return {
        "lookup_plus_gather_us": round(both, 2),
        "ratio": round(both / figures["lower_stack_us"], 6),
        "gather_to_sequential": round(figures["gather_us"] / figures["sequential_us"], 3),
        "both_to_sequential": round(both / figures["sequential_us"], 3),
        "both_to_compiled_sequential": round(both / figures["compiled_sequential_us"], 3),
        "lookup_to_arrays": round(figures["lookup_us"] / figures["lookup_by_arrays_us"], 3),
        "gather_to_torch": round(figures["gather_us"] / figures["gather_by_torch_us"], 3),
        "int8_to_gather": round(figures["int8_gather_us"] / figures["gather_us"], 3),
        "keys_10m_to_1m": round(figures["keys_10m_us"] / figures["keys_1m_us"], 3),
        "cold_to_pread": round(figures["cold_us"] / figures["pread_us"], 3),
        "build_to_forward": round(figures["build_ngrams_per_s"] / figures["forward_ngrams_per_s"], 3),
    }


def _warm(
    case: PlotBench, forests: dict[str, Forest], texts: list[np.ndarray], addresses: list[np.ndarray], lengths: np.ndarray
) -> dict[str, Timing]:
    forest, int8 = forests["fp16"], forests["int8"]
    chain = forest.chain("fp16", VERSION)
    table = chain.links[0][0]
    half, full = Gatherer(CPU, torch.bfloat16), Gatherer(CPU, torch.float32)
    by_torch = Gatherer(CPU, torch.bfloat16, compiled=False)
    vectors = table.meta.window.vectors
    run = min(case.tokens, table.size)
    starts = np.random.default_rng(3).integers(0, table.size - run + 1, TEXTS)
    rows = [np.arange(start, start + run) for start in starts.tolist()]
    consecutive = [torch.arange(start * vectors, (start + run) * vectors).view(run, vectors) for start in starts.tolist()]
    for number, mine in enumerate(rows):
        table.rows.touch(mine)
        half.broken(int8, addresses[number])
        half.broken(forest, addresses[number])
    return alternate(
        {
            "lookup": lambda text: chain.lookup(texts[text % TEXTS], lengths),
            "gather": lambda text: half.sums(forest, addresses[text % TEXTS], lengths),
            "lookup_by_arrays": lambda text: chain.lookup_by_arrays(texts[text % TEXTS], lengths),
            "gather_by_torch": lambda text: by_torch.sums(forest, addresses[text % TEXTS], lengths),
            "gather_fp32": lambda text: full.sums(forest, addresses[text % TEXTS], lengths),
            "touch": lambda text: half.broken(forest, addresses[text % TEXTS]),
            "sequential": lambda text: table.rows.bags(consecutive[text % TEXTS], torch.bfloat16),  # by torch
            "compiled_sequential": lambda text: half.sums(forest, rows[text % TEXTS], lengths),
            "int8_gather": lambda text: half.sums(int8, addresses[text % TEXTS], lengths),
            "int8_gather_by_torch": lambda text: by_torch.sums(int8, addresses[text % TEXTS], lengths),
        },
        case.seconds,
        warm_up=TEXTS,
    )


def _lower_layers(case: PlotBench) -> dict[str, Timing]:
    """Measures the layers that the table replaces, on one text. CPUs without bf16 products emulate them."""
    config = config_of(case)
    attend = PackedAttention([case.tokens], config.heads)

    def stack(dtype: torch.dtype):
        layers = nn.ModuleList(Layer(config) for _ in range(config.lower_layers)).to(dtype).eval()
        x = torch.randn(case.tokens, config.hidden, dtype=dtype)

        @torch.inference_mode()
        def run(text: int) -> None:
            hidden = x
            for layer in layers:
                hidden = layer(hidden, attend)

        return run

    return alternate({f"lower_stack_{name}": stack(getattr(torch, name)) for name in ("bfloat16", "float32")}, case.seconds)


def _index(case: PlotBench, scratch: Path) -> dict[str, Timing]:
    """Measures only `find`, for keys anywhere in the table."""
    generator = np.random.default_rng(17)
    variants = {}
    for name, count in (("keys_1m", case.keys), ("keys_10m", MORE * case.keys)):
        first = generator.permutation(np.unique(generator.integers(0, 1 << 62, count, dtype=np.uint64)))
        others = generator.integers(0, 1 << 62, (len(first), space_of(case).words - 1), dtype=np.uint64)
        keys = np.column_stack([first, others])
        (scratch / name).mkdir()
        index = Index(scratch / name, write_index(scratch / name, keys))
        asked = keys[generator.integers(0, len(keys), (INDEX_TEXTS, case.tokens))]
        variants[name] = lambda text, index=index, asked=asked: index.find(asked[text % INDEX_TEXTS])
    timings = alternate(variants, case.seconds, warm_up=INDEX_TEXTS)
    for name in variants:
        shutil.rmtree(scratch / name)
    return timings


def _building(case: PlotBench, scratch: Path) -> dict[str, float]:
    """Measures in turn, on all cores, the bare lower stack on the builder's batches, and writing a table with this stack."""
    lower = random_backbone(config_of(case))[0].eval()
    spec = spec_of(case, "fp16")
    keys = spec.space.pack(np.random.default_rng(19).integers(1, case.vocabulary + 1, (case.build_keys, spec.n)))
    keys = np.unique(keys, axis=0)

    @torch.inference_mode()
    def values_of(windows: np.ndarray) -> torch.Tensor:
        return lower(torch.from_numpy(windows)).cpu()

    def forward() -> None:
        for start in range(0, len(keys), BATCH):
            values_of(spec.space.unpack(keys[start : start + BATCH]))

    def build() -> None:
        write_table(scratch / "built", spec, keys, values_of)

    values_of(spec.space.unpack(keys[:64]))
    taken: dict[str, list[float]] = {"forward": [], "build": []}
    for _ in range(2):
        for name, variant in (("forward", forward), ("build", build)):
            start = time.perf_counter()
            variant()
            taken[name].append(time.perf_counter() - start)
        shutil.rmtree(scratch / "built")
    return {f"{name}_ngrams_per_s": round(len(keys) / float(np.median(times)), 1) for name, times in taken.items()}


def table_of(figures: dict) -> str:
    """Returns a line for each figure, with its median, its spread and its target."""
    lines = [f"{figures['cpu']}, torch {figures['torch']}, {figures['dtype']}, 1 thread ({figures['build_threads']} to build)"]
    lines.append(f"compiled kernel: {'used' if figures['compiled_kernel'] else 'missing'}")
    lines.append("found: " + ", ".join(f"{name} {share:.1%}" for name, share in figures["found"].items()))
    for name, value in figures.items():
        if isinstance(value, dict | str) or name in ("threads", "build_threads", "compiled_kernel"):
            continue
        line = f"{name:28}{value:>14,}"
        if (spread := figures["spread_us"].get(name.removesuffix("_us"))) is not None:
            line += f"   least {spread['least']:,}, p90 {spread['p90']:,}"
        if (target := TARGETS.get(name)) is not None:
            met = value <= target if target > 0 else value >= -target
            line += f"   {'at most' if target > 0 else 'at least'} {abs(target)}: {'met' if met else 'MISSED'}"
        lines.append(line)
    return "\n".join(lines)
