"""Tables and texts for `hplm bench plot`: values are random, and keys and texts have realistic statistics."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from bench.plot import PlotBench
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.windows import Window
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.keys import KeySpace
from hplm.plot.table import Table, TableSpec
from hplm.plot.writing import BATCH, write_table
from testing.random_store import BERT_BASE, random_documents, ranked_keys

COMPARED = ("fp16", "int8")
TEXTS = 256  # together they read more rows than the CPU's caches hold
LONGEST_DOCUMENT = 512
VERSION = 1


def config_of(case: PlotBench) -> BackboneConfig:
    """Returns BERT-base with the benchmark's vocabulary, width and window."""
    heads = case.hidden // 64 if case.hidden % 64 == 0 else 1
    return replace(
        BERT_BASE, vocabulary=case.vocabulary, hidden=case.hidden, heads=heads, intermediate=4 * case.hidden,
        window=Window(case.window),
    )  # fmt: skip


def space_of(case: PlotBench) -> KeySpace:
    return KeySpace(case.vocabulary, Window(case.window))


def spec_of(case: PlotBench, dtype: str) -> TableSpec:
    config = config_of(case)
    return TableSpec(
        domain=dtype, version=VERSION, parent=None, parent_version=None, n=config.window.n, causal=config.window.causal,
        vocabulary=config.vocabulary, hidden=config.hidden, dtype=dtype, corpus_tokens=4 * case.keys,
    )  # fmt: skip


def tables(case: PlotBench, folder: Path) -> dict[str, Forest]:
    """Returns a forest for each dtype, each of one table with the same rows. Uses tables that `folder` already has."""
    missing = [dtype for dtype in COMPARED if not _fits(case, folder, dtype)]
    _expect_space(case, folder, missing)
    if missing:
        keys = _keys(case)
        pool = torch.randn(BATCH, case.window, case.hidden, generator=torch.Generator().manual_seed(5))
        for dtype in missing:
            shutil.rmtree(folder / dtype, ignore_errors=True)
            with tqdm(total=len(keys), desc=f"writing the {dtype} table", unit="n-gram", unit_scale=True) as bar:
                # The same few thousand rows are repeated: the measured time depends on their places, not on their values.
                path = folder / dtype / str(VERSION)
                write_table(path, spec_of(case, dtype), keys, lambda windows: pool[: len(windows)], progress=bar.update)
    return {dtype: open_forest(folder, dtype) for dtype in COMPARED}


def open_forest(folder: Path, dtype: str) -> Forest:
    return Forest([folder], assign_addresses([Table(folder / dtype / str(VERSION))]))


def fresh_texts(case: PlotBench) -> list[np.ndarray]:
    """Returns texts that are not from the corpus of the keys, but have its distribution."""
    return random_documents(config_of(case), TEXTS * case.tokens, case.tokens, seed=11)


def write_corpus(folder: Path, case: PlotBench) -> None:
    """Writes a tokenised corpus in the builder's format."""
    documents = random_documents(config_of(case), case.count_tokens, LONGEST_DOCUMENT, seed=13)
    folder.mkdir()
    np.concatenate(documents).astype("<u4").tofile(folder / "tokens")
    ends = np.cumsum([len(document) for document in documents])
    ends.astype("<u8").tofile(folder / "ends")
    (folder / "meta.json").write_text(json.dumps({"tokens": int(ends[-1]), "documents": len(documents)}), "utf-8")


def _keys(case: PlotBench) -> np.ndarray:
    """Returns the most frequent n-grams of a Zipf corpus, ranked as by the builder, and then the remaining tokens."""
    space = space_of(case)
    documents = random_documents(config_of(case), 4 * case.keys, LONGEST_DOCUMENT, seed=7)
    ranked = ranked_keys(documents, space, root=True)
    if len(ranked) < case.keys:
        raise InvalidInput(
            f"a vocabulary of {case.vocabulary} has too few n-grams for a table of {case.keys}: give fewer --keys"
        )
    chosen, missing = ranked[: case.keys], np.ones(case.vocabulary, dtype=bool)
    alone = chosen[((chosen & space.masks[-1]) == chosen).all(1)]
    missing[space.unpack(alone)[:, space.window.centre] - 1] = False
    return np.concatenate([chosen, space.unigrams()[missing]])


def _fits(case: PlotBench, folder: Path, dtype: str) -> bool:
    path = folder / dtype / str(VERSION)
    if not path.exists():
        return False
    meta = Table(path).meta
    is_size = case.keys <= meta.keys <= case.keys + case.vocabulary
    if not is_size or (meta.hidden, meta.n) != (case.hidden, case.window):
        raise InvalidInput(
            f"{path} holds {meta.keys:,} {meta.n}-grams of width {meta.hidden}: remove it, or choose another --folder"
        )
    return True


def _expect_space(case: PlotBench, folder: Path, missing: list[str]) -> None:
    values = sum((case.keys + case.vocabulary + 1) * spec_of(case, dtype).row_bytes for dtype in missing)
    indexes = 11 * case.keys * (8 * space_of(case).words + 24)  # 1 x and 10 x the keys: keys, rows and starts
    counting = 60 * case.count_tokens  # runs and merged counts
    needed, free = values + indexes + counting, shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidInput(
            f"the benchmark needs {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free: "
            "free some space, choose another --folder, or give fewer --keys"
        )
