"""The root: a pretrained BERT split in two, its lower half adapted to n-gram windows, and the first table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from builder.adaptation.distillation import AdaptationReport, Budget, adapt
from builder.data import read_corpus
from builder.store import Store, check_name
from builder.table import build_table
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint, split
from hplm.model.tokenizer import Tokenizer
from hplm.plot.table import Table

TOKENIZED_AT_ONCE = 1000


@dataclass(frozen=True)
class RootOptions:
    name: str | None = None  # default: the model's
    lower: int | None = None  # default: half the layers
    upper: int | None = None  # default: the rest
    window: int = 3
    keep: float = 1.0
    dtype: str = "fp16"
    seed: int = 0


def build_root(
    model: str, corpus: list[Path], folder: Path, options: RootOptions, budget: Budget, device: torch.device
) -> tuple[Store, Table]:
    """Cut anywhere, it goes on with what is not done yet: adaptation, then the table."""
    if (folder / "store.json").exists():
        store = Store(folder)
        if ("root", 1) in store.domains():
            raise InvalidInput(f"{folder} holds a finished root already: choose another --store, or remove it")
        documents = tokenize(store.tokenizer(), read_corpus(corpus))
    else:
        checkpoint = load_checkpoint(model, options.name, options.lower, options.upper, options.window)
        check_name("backbone", checkpoint.config.name)
        documents = tokenize(Tokenizer(checkpoint.tokenizer_json, checkpoint.config.positions), read_corpus(corpus))
        lower, upper = split(checkpoint)
        report = adapt(checkpoint, lower, upper, documents, budget, options.seed, train_upper=True, device=device)
        store = Store.create(folder, model, checkpoint.config, checkpoint.tokenizer_json, lower, upper)
        save_report(store, "root", 1, report)
    lower = store.lower("root", 1)
    return store, build_table(store, "root", 1, None, lower, documents, options.keep, options.dtype, device)


def tokenize(tokenizer: Tokenizer, texts: Iterable[str]) -> list[np.ndarray]:
    documents: list[np.ndarray] = []
    batch: list[str] = []
    for text in tqdm(texts, desc="tokenising the corpus", unit="doc"):
        batch.append(text)
        if len(batch) == TOKENIZED_AT_ONCE:
            documents += tokenizer.encode_documents(batch)
            batch.clear()
    return documents + tokenizer.encode_documents(batch)


def save_report(store: Store, domain: str, version: int, report: AdaptationReport) -> None:
    path = store.folder / "lower" / f"{domain}-{version}.json"
    path.write_text(json.dumps(asdict(report), indent=2) + "\n", "utf-8")
