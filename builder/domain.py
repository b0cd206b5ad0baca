"""A domain: a branch of the tree, its lower stack brought closer to a corpus, its frequent n-grams in a table of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from builder.adaptation.distillation import Budget, adapt
from builder.data import read_corpus
from builder.root import save_report, tokenize
from builder.store import Store, check_name
from builder.table import build_table
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint
from hplm.plot.table import Table


@dataclass(frozen=True)
class DomainOptions:
    parent: str = "root"
    keep: float = 1.0
    dtype: str = "fp16"
    seed: int = 0


def build_domain(
    store: Store, name: str, corpus: list[Path], options: DomainOptions, budget: Budget, device: torch.device
) -> Table:
    """The upper half is shared and stays as it is: only the lower layers learn (HMI, observation O1)."""
    check_name("domain", name)
    if any(domain == name for domain, _ in store.domains()):
        raise InvalidInput(f"domain {name!r} is in {store.folder} already: choose another --name")
    parent = (options.parent, store.latest(options.parent))
    config = store.config
    documents = tokenize(store.tokenizer(), read_corpus(corpus))
    lower = store.lower(*parent)
    if not budget.empty:
        teacher = load_checkpoint(store.model, config.name, config.lower_layers, config.upper_layers, config.window)
        report = adapt(
            teacher, lower, store.upper(), documents, budget, options.seed, train_upper=False, device=device
        )
        save_report(store, name, 1, report)
    store.save_lower(name, 1, lower)
    return build_table(store, name, 1, parent, lower, documents, options.keep, options.dtype, device)
