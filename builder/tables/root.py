"""Builds the root: splits a pretrained model, adapts its lower half to n-gram windows, and makes the first table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from builder.console import say, waiting
from builder.learning.causal import learn_windows
from builder.learning.distil import distil
from builder.learning.limits import Budget
from builder.learning.masked import further_pretrain, given_head
from builder.pictures import draw_learning
from builder.store.branches import UPPER, Branches, table_spec
from builder.store.resumable import clear_work_folder, write_json
from builder.store.store import Store, absolute_model, check_name
from builder.tables.build_folder import BuildFolder, finished_table, locked_folder, resumed_build
from builder.tables.counts import Counts
from builder.tables.table import TableOptions, build_table, check_table, chosen_keep
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint, split
from hplm.model.windows import TRIGRAMS, Window
from hplm.plot.meta import TableSpec
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
    """Builds a store with a root. The same call after an interruption continues, and after its end changes nothing.

    A decoder without lower layers needs no corpus: its table holds the vectors of its words.
    """
    model, place = absolute_model(model), Branches(folder)
    files = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in _files_of(Path(model))]
    plan = {"model": model, "files of the model": files, **options.planned(), **asdict(budget)}
    with locked_folder(place.work_folder("root", 1), f"the root of {folder}"):
        if (folder / "store.json").exists() and (store := Store(folder)).domains():
            if (table := finished_table(store, ("root", 1), corpus, plan)) is not None:
                return store, table
            raise InvalidInput(f"{folder} holds a finished root already: choose another --store, or remove it")
        with resumed_build(place, ("root", 1), corpus, plan, partial(_clear, place)) as build:
            if not (folder / "store.json").exists() or not place.has_lower("root", 1):
                _learn(build, model, folder, options, budget, device)
            store = Store(folder)
            table = build_table(store, *_planned(store, build, options), store.lower("root", 1), device)
            clear_work_folder(build.folder)
            return store, table


def _files_of(model: Path) -> list[Path]:
    """Returns the files with the weights and settings of a model that lies here."""
    found = model.iterdir() if model.is_dir() else [model]
    return sorted(file for file in found if file.suffix in (".safetensors", ".bin", ".json", ".gguf") and file.is_file())


def _clear(place: Branches) -> None:
    place.remove_branch("root", 1)
    if (place.folder / "store.json").exists():  # else files of these names may be others'
        for name in ("store.json", "backbone.json", "tokenizer.json", UPPER):
            (place.folder / name).unlink(missing_ok=True)


def _planned(store: Store, build: BuildFolder, options: RootOptions) -> tuple[TableSpec, Counts | None, float]:
    """Counts the corpus, if there is one. Returns what the table is, its counts, and the share of them that it takes."""
    counts, tokens = None, 0
    if build.paths:
        counts = build.count(store, store.counts_folder("root", 1))
        tokens = counts.tokens
    store.save_origin("root", 1, build.paths, build.plan)
    spec = table_spec(store.config, "root", 1, None, options.dtype, tokens)
    return spec, counts, chosen_keep(counts, root=True, keep=options.keep)


def _learn(build: BuildFolder, model: str, folder: Path, options: RootOptions, budget: Budget, device: torch.device) -> None:
    """Makes the store, unless it is there, refuses a table without room, and saves the lower layers once they have learned."""
    with waiting(f"reading {model}"):
        checkpoint = load_checkpoint(model, options.name, options.lower, options.upper, options.window)
        config, (lower, upper) = checkpoint.config, split(checkpoint)
    check_name("backbone", config.name)
    if config.lower_layers and not build.paths:
        without = ", or --lower 0, which needs none" if config.is_decoder else ""
        raise InvalidInput(f"the n-grams of a table come from a corpus: give --corpus FILE...{without}")
    if not (folder / "store.json").exists():
        if (folder / "config.json").exists():
            raise InvalidInput(f"{folder} holds a model, whose files would be replaced: choose another --store")
        Store.create(folder, model, config, checkpoint.tokenizer_json, None, upper)
    store = Store(folder)
    check_table(folder, *_planned(store, build, options), lower, device)
    if checkpoint.skipbert and not budget.empty:
        say(f"{model}: a SkipBERT is used as it was trained; nothing is adapted")
    elif config.is_decoder and config.lower_layers and not budget.empty:
        if options.masked:
            raise InvalidInput("--masked is for encoders: a decoder has no masked words to guess")
        documents = build.documents(store, options.seed)
        report = learn_windows(
            checkpoint, config, lower, upper, documents, budget, options.seed, device, build.folder / "learning.pt"
        )
        save_report(store, "root", 1, report)
        store.save_upper(upper)
    elif not (checkpoint.skipbert or config.is_decoder):
        documents, seed, masked = build.documents(store, options.seed), options.seed, budget.part(options.masked)
        distilling = replace(budget.part(1 - options.masked), until=budget.until)
        report = distil(checkpoint, lower, upper, documents, distilling, seed, device, saved=build.folder / "learning.pt")
        if not masked.empty:
            saved, given = build.folder / "masked.pt", (given_head(model, config), "the checkpoint's")
            head, report["masked"] = further_pretrain(
                config, lower, upper, *given, documents, masked, seed, device, saved=saved
            )
            store.save_masked_head("root", 1, head.state_dict())
        save_report(store, "root", 1, report)
        store.save_upper(upper)
    store.save_lower("root", 1, lower)


def save_report(store: Store, domain: str, version: int, report: dict[str, Any]) -> None:
    path = store.learning(domain, version)
    path.parent.mkdir(exist_ok=True)
    write_json(path, report)
    if report["curve"]:
        metric = report.get("score", "-loss" if "head" in report else "share explained")
        draw_learning(report, metric, f"{domain} version {version}", path.with_suffix(".png"))
