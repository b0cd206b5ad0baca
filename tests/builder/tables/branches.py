"""Branches of toy corpora, built step by step as a store's are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from builder.store.store import Store
from builder.tables.corpus import Corpus, tokenize_corpus
from builder.tables.counting import count_ngrams
from builder.tables.counts import Counts
from builder.tables.table import build_table
from hplm.model.checkpoint import random_backbone
from hplm.model.windows import Window
from hplm.plot.table import Table
from testing.random_store import tokenizer_json, words
from testing.toy import CONFIG

CPU = torch.device("cpu")


def make_store(folder: Path, window: Window) -> Store:
    config = replace(CONFIG, window=window)
    lower, upper = random_backbone(config)
    return Store.create(folder / "store", "m", config, tokenizer_json(config.vocabulary), lower, upper)


def build(
    store: Store, folder: Path, domain: str, lines: Sequence[str], keep: float = 1.0, dtype: str = "fp16"
) -> tuple[Table, Corpus, Counts]:
    """Builds a branch without a parent, with the root's lower stack."""
    work = folder / f"work-{domain}"
    work.mkdir()
    (work / "corpus.txt").write_text("\n".join(lines), "utf-8")
    corpus = tokenize_corpus([work / "corpus.txt"], store.tokenizer(), work / "tokens", show_progress=False)
    counts = count_ngrams(corpus, store.space, work / "counts", show_progress=False)
    spec = store.table_spec(domain, 1, None, dtype, counts.tokens)
    table = build_table(store, spec, counts, store.lower("root", 1), keep, CPU, work, show_progress=False)
    return table, corpus, counts


def some_lines(count: int, seed: int) -> list[str]:
    """Returns lines of twenty words, drawn by Zipf's law."""
    rng = np.random.default_rng(seed)
    known = words(CONFIG.vocabulary)
    weights = 1 / np.arange(1, len(known) + 1)
    return [" ".join(rng.choice(known, 20, p=weights / weights.sum())) for _ in range(count)]
