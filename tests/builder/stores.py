"""Corpora and stores of toy words, built step by step as a user's are. Most are built once, and copied."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from builder.console import no_progress_bars
from builder.learning.limits import Budget
from builder.store.branches import table_spec
from builder.store.store import Store, TenantVersion
from builder.tables.corpus import Corpus, tokenize_corpus
from builder.tables.counts import Counts, count_ngrams
from builder.tables.domain import DomainOptions, UpdateOptions, build_domain, update_domain
from builder.tables.root import RootOptions, build_root
from builder.tables.table import build_table
from builder.tasks.lookup import Reader
from hplm.model.config import BackboneConfig
from hplm.model.windows import TRIGRAMS, Window
from hplm.plot.table import Table
from hplm.plot.writing import write_table
from testing.random_store import random_backbone, random_tenant, random_values, tokenizer_json, words
from testing.toy import CONFIG
from tests.support.device import DEVICE

NO_TIME = Budget(steps=0)
SMALL = DomainOptions(min_tokens=1)


@contextmanager
def light() -> Iterator[None]:
    """One thread, because more would only wait for each other; and no sync, because a kill takes nothing that was written.

    `store/test_store.py` looks at what is synced.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with no_progress_bars(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
    torch.set_num_threads(threads)


def some_lines(count: int, seed: int) -> list[str]:
    """Returns lines of twenty words, drawn by Zipf's law."""
    rng = np.random.default_rng(seed)
    known = words(CONFIG.vocabulary)
    weights = 1 / np.arange(1, len(known) + 1)
    return [" ".join(rng.choice(known, 20, p=weights / weights.sum())) for _ in range(count)]


def corpus(folder: Path, seed: int, lines: int = 30) -> Path:
    """Writes such lines once."""
    path = folder / f"corpus-{seed}.txt"
    if not path.exists():
        path.write_text("\n".join(some_lines(lines, seed)), "utf-8")
    return path


def make_store(folder: Path, config: BackboneConfig = CONFIG, scale: float = 1.0) -> Store:
    """Makes a store without tables. `scale`: by how much its weights are larger than BERT's initial ones."""
    lower, upper = random_backbone(config)
    with torch.no_grad():
        for name, parameter in [*lower.named_parameters(), *upper.named_parameters()]:
            parameter.mul_(1.0 if "norm" in name else scale)
    return Store.create(folder, "m", config, tokenizer_json(config.vocabulary), lower, upper)


def build(
    store: Store, folder: Path, domain: str, lines: Sequence[str], keep: float = 1.0, dtype: str = "fp16"
) -> tuple[Table, Corpus, Counts]:
    """Builds a branch without a parent, with the root's lower stack."""
    work = folder / f"work-{domain}"
    work.mkdir()
    (work / "corpus.txt").write_text("\n".join(lines), "utf-8")
    corpus = tokenize_corpus([work / "corpus.txt"], store.tokenizer(), work / "tokens")
    counts = count_ngrams(corpus, store.space, work / "counts")
    spec = table_spec(store.config, domain, 1, None, dtype, counts.tokens)
    table = build_table(store, spec, counts, keep, store.lower("root", 1), DEVICE)
    return table, corpus, counts


def decoder_store(model: str, folder: Path, lower: int = 0, texts: Sequence[Path] = ()) -> Store:
    """Builds the root of a saved decoder, whose lower layers have windows of three tokens."""
    options = RootOptions(lower=lower, window=Window(3 if lower else 1))
    return build_root(model, list(texts), folder, options, NO_TIME, DEVICE)[0]


@cache
def _built(window: Window, keep: float, domain: str | None = None) -> tuple[Path, TemporaryDirectory[str]]:
    """Builds a store once for all tests. The second value removes its folder at the end."""
    owner = TemporaryDirectory()
    folder = Path(owner.name)
    if domain is not None:
        store = rooted(folder, window, keep)
        add_domain(store, domain, 1)
        return store.folder, owner
    store = make_store(folder / "store", replace(CONFIG, window=window))
    _, _, counts = build(store, folder, "root", some_lines(20, seed=0), keep)
    store.counts_folder("root", 1).parent.mkdir(parents=True)
    counts.folder.rename(store.counts_folder("root", 1))
    return store.folder, owner


def rooted(folder: Path, window: Window = TRIGRAMS, keep: float = 1.0) -> Store:
    """A store with a root, without the checkpoint that a real one comes from."""
    return Store(shutil.copytree(_built(window, keep)[0], folder / "store"))


def with_bio(folder: Path) -> Store:
    """A store with a root and the domain `bio` of the first corpus."""
    return Store(shutil.copytree(_built(TRIGRAMS, 1.0, "bio")[0], folder / "store"))


def add_tenant(store: Store, name: str, domain: str, version: int = 1) -> None:
    random_tenant(store, TenantVersion(name, 1, domain, version, "classify", ["a", "b"], 0), 0.3, seed=1)


def add_domain(store: Store, name: str, *seeds: int, **options: Any) -> Table:
    """Builds a domain of the corpora of these seeds, which are beside the store, without learning."""
    texts = [corpus(store.folder.parent, seed) for seed in seeds]
    return build_domain(store, name, texts, replace(SMALL, **options), NO_TIME, DEVICE)


def grow(store: Store, name: str, seed: int, **options: Any) -> Table:
    """Updates a domain by the corpus of this seed, without learning."""
    return update_domain(store, name, [corpus(store.folder.parent, seed)], UpdateOptions(**options), NO_TIME, DEVICE)


def rows(table: Table) -> dict[bytes, bytes]:
    values = table.rows.raw(np.arange(1, table.size))
    return {key.tobytes(): value.tobytes() for key, value in zip(table.index.by_row(), values, strict=True)}


def give_other_values(store: Store, domain: str, version: int) -> None:
    """Writes the table of a branch again, with random values."""
    table = store.table(domain, version)
    spec = table_spec(store.config, domain, version, table.meta.parent_branch, table.meta.dtype, table.meta.corpus_tokens)
    keys = table.index.by_row().copy()
    shutil.rmtree(table.folder)
    write_table(table.folder, spec, keys, random_values(spec, seed=1234))


def interrupted(*_: object, **__: object) -> None:
    """Is called as anything, and is interrupted."""
    raise KeyboardInterrupt


@contextmanager
def nothing_looked_up() -> Iterator[None]:
    """Lets no text be looked up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "read", None)
        yield


def cut(store: Store, build: Callable[..., object], *given: Any, at: str = "chain", **options: Any) -> None:
    """Interrupts a build of this store where it would compute its table, or call another method of the store."""
    with pytest.raises(KeyboardInterrupt):
        build(type("Cut", (Store,), {at: interrupted})(store.folder), *given, **options)


@contextmanager
def full_disk(free: int = 1000) -> Iterator[None]:
    """Lets every file system have so few free bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        yield


def meanwhile(store: Store, method: str, act: Callable[[], object]) -> Store:
    """Returns the store for a command. Another process does `act` right after the command has called this method."""
    acts = [act]

    def called(self: Store, *given: Any) -> Any:
        found = getattr(Store, method)(self, *given)
        while acts:
            acts.pop()()
        return found

    return type("Meanwhile", (Store,), {method: called})(store.folder)
