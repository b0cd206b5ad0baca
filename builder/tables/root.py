"""Builds the root: splits a pretrained model, adapts its lower half to n-gram windows, and makes the first table."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from builder.learning.distil import distil
from builder.learning.limits import Budget
from builder.learning.masked import further_pretrain, given_head
from builder.page import branch_page
from builder.pictures import draw_learning
from builder.said import say
from builder.store.branches import table_spec
from builder.store.resumable import write_json
from builder.store.store import Store, absolute_model, check_name
from builder.tables.build_folder import BuildFolder, held, put_away, was_just_finished
from builder.tables.table import TableOptions, build_table, check_table, chosen_keep
from hplm.errors import InvalidInput
from hplm.model.checkpoint import Checkpoint, load_checkpoint, split
from hplm.model.stacks import LowerStack
from hplm.model.tokenizer import Tokenizer
from hplm.model.windows import TRIGRAMS, Window
from hplm.plot.keys import KeySpace
from hplm.plot.table import Table


@dataclass(frozen=True)
class RootOptions(TableOptions):
    dtype: str = "fp16"
    name: str | None = None  # default: the model's name
    lower: int | None = None  # default: half the layers
    upper: int | None = None  # default: the rest
    window: Window = TRIGRAMS
    masked: float = 0.0  # share of the time in which the lower layers then guess masked words

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.masked < 1:
            raise InvalidInput(f"--masked {self.masked:g}: give a share of the time, from 0 to less than 1")


def build_root(
    model: str, corpus: list[Path], folder: Path, options: RootOptions, budget: Budget, device: torch.device
) -> tuple[Store, Table]:
    """Builds a store with a root. The same call after an interruption continues: tokens, adaptation, counts, table.

    A decoder without lower layers needs no corpus: its table holds the vectors of its words.
    """
    model = absolute_model(model)
    working, plan = folder / "building" / "root-1", {"model": model, **asdict(options), **asdict(budget)}
    with held(working, f"the root of {folder}"):
        if (folder / "store.json").exists() and (store := Store(folder)).domains():
            if was_just_finished(working, corpus, plan):
                branch_page(store, table := store.table("root", 1), working)  # it may be missing
                put_away(working)
                return store, table
            raise InvalidInput(f"{folder} holds a finished root already: choose another --store, or remove it")
        build = BuildFolder(working, corpus, plan, clear=lambda: _clear(folder))
        begun = (folder / "store.json").exists()
        store = Store(folder) if begun else _adapted(model, build, folder, options, budget, device)
        counts = build.count(store.space, store.tokenizer(), _counts(folder)) if corpus else None
        if counts is not None:
            store.save_corpus("root", 1, corpus)
        spec = store.table_spec("root", 1, None, options.dtype, counts.tokens if counts is not None else 0)
        keep = chosen_keep(counts, root=True, keep=options.keep)
        table = build_table(store, spec, counts, store.lower("root", 1), keep, device)
        branch_page(store, table, working)
        build.close()
        return store, table


def _counts(folder: Path) -> Path:
    """As `Store.counts_folder` of the root: it is there before the store is."""
    return folder / "counts" / "root" / "1"


def _clear(folder: Path) -> None:
    shutil.rmtree(_counts(folder), ignore_errors=True)
    if (folder / "store.json").exists():
        Store(folder).remove_branch("root", 1)
        (folder / "store.json").unlink()


def _adapted(model: str, build: BuildFolder, folder: Path, options: RootOptions, budget: Budget, device: torch.device) -> Store:
    checkpoint = load_checkpoint(model, options.name, options.lower, options.upper, options.window)
    check_name("backbone", checkpoint.config.name)
    if checkpoint.config.lower_layers and not build.has_corpus:
        without = ", or --lower 0, which needs none" if checkpoint.config.is_decoder else ""
        raise InvalidInput(f"the n-grams of a table come from a corpus: give --corpus FILE...{without}")
    lower, upper = split(checkpoint)
    _refuse_large(build, folder, checkpoint, lower, options, device)
    if checkpoint.skipbert or checkpoint.config.is_decoder:
        if checkpoint.config.lower_layers and not budget.empty:
            why = "a SkipBERT is used as it was trained" if checkpoint.skipbert else "its lower layers do not learn yet"
            say(f"{model}: {why}; nothing is adapted")
        return Store.create(folder, model, checkpoint.config, checkpoint.tokenizer_json, lower, upper)
    documents = build.documents(Tokenizer(checkpoint.tokenizer_json, checkpoint.config.positions), options.seed)
    seed, config, masked = options.seed, checkpoint.config, budget.part(options.masked)
    distilling = replace(budget.part(1 - options.masked), until=budget.until)
    saved = build.folder / "learning.pt"
    report = distil(checkpoint, lower, upper, documents, distilling, seed, device, saved=saved)
    head = None
    if not masked.empty:
        saved = build.folder / "masked.pt"
        head, guessing = further_pretrain(
            config, lower, upper, given_head(model, config), "the checkpoint's", documents, masked, seed, device, saved=saved
        )
        report["masked"] = guessing
    save_report(folder, "root", 1, report)
    return Store.create(folder, model, config, checkpoint.tokenizer_json, lower, upper, head)


def _refuse_large(
    build: BuildFolder, folder: Path, checkpoint: Checkpoint, lower: LowerStack, options: RootOptions, device: torch.device
) -> None:
    """Counts the n-grams before anything learns, so that a table that has no room is refused at once."""
    config, counts = checkpoint.config, None
    if build.has_corpus:
        tokenizer = Tokenizer(checkpoint.tokenizer_json, config.positions, config.start_id)
        counts = build.count(KeySpace(config.vocabulary, config.window), tokenizer, _counts(folder))
    spec = table_spec(config, "root", 1, None, options.dtype, counts.tokens if counts is not None else 0)
    with build.refusable():
        check_table(folder, spec, counts, chosen_keep(counts, True, options.keep), lower, device)


def save_report(store_folder: Path, domain: str, version: int, report: dict[str, Any]) -> None:
    path = store_folder / "lower" / f"{domain}-{version}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, report)
    if report["curve"]:
        metric = "-loss" if "head" in report else "share explained"
        draw_learning(report, metric, f"{domain} version {version}", path.with_suffix(".png"))
