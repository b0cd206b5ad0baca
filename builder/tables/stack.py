"""Builds a shorter upper stack, which all tenants of a store share as they share the full one."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from builder.adaptation.learning import Budget
from builder.adaptation.learning_curve import draw_adaptation
from builder.adaptation.short_stack import shorten
from builder.options import check_seed
from builder.store.store import Store, check_name
from builder.tables.build_folder import BuildFolder, held, plan_of, put_away
from hplm.errors import InvalidInput


@dataclass(frozen=True)
class StackOptions:
    layers: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)


def build_stack(
    store: Store, name: str, corpus: list[Path], options: StackOptions, budget: Budget, device: torch.device
) -> dict[str, Any]:
    """Builds a stack and returns its report. It learns on the vectors of the root's lower stack, which stays as it is.

    The same call after an interruption continues; after the end it changes nothing.
    """
    check_name("stack", name)
    _check_layers(store, options.layers)
    version, working = store.latest("root"), store.stack_work_folder(name)
    settings = {**asdict(options), **asdict(budget)}
    with held(working, f"stack {name!r}"):
        asked = plan_of(corpus, settings)
        if name in store.stacks():
            report = store.stack_report(name)
            if report.get("asked") != asked:
                raise InvalidInput(
                    f"stack {name!r} is in {store.folder} already, from another command: choose another --name, or remove "
                    f"{store.stack_file(name, '.*')} if no tenant has a level on it"
                )
            put_away(working)
            print(f"stack {name}: it has learned this corpus with these options", file=sys.stderr)
            return report
        build = BuildFolder(working, corpus, settings, clear=lambda: None)
        documents = build.documents(store.tokenizer(), options.seed)
        stack, learned = shorten(
            store.lower("root", version), store.upper(), options.layers, documents, budget, options.seed, device,
            saved=build.folder / "adaptation.pt",
        )  # fmt: skip
        report = {**asdict(learned), "asked": asked}
        title = f"stack {name}: {options.layers} of {store.config.upper_layers} layers"
        store.save_stack(name, stack, report, partial(draw_adaptation, report, title) if learned.curve else None)
        build.close()
        return report


def _check_layers(store: Store, layers: int) -> None:
    config = store.config
    if config.is_decoder:
        raise InvalidInput(f"backbone {config.name!r} is a decoder, and only encoders have stacks of fewer layers")
    if config.upper_layers == 1:
        raise InvalidInput(f"backbone {config.name!r} has a single upper layer, so that no stack can have fewer")
    if not 1 <= layers < config.upper_layers:
        raise InvalidInput(
            f"--layers {layers}: the full upper stack of backbone {config.name!r} has {config.upper_layers}; give 1 to "
            f"{config.upper_layers - 1}"
        )
