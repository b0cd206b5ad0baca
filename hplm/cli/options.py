"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hplm.errors import InvalidInput

if TYPE_CHECKING:
    import torch

CORPUS = "files with one document a line, or JSONL with a field `text`; plain, .gz or .zst"


class TaskNames:
    """The names of the tasks. They are imported on first use, because tasks import numpy, which slows down `hplm --help`."""

    def __iter__(self) -> Iterator[str]:
        from hplm.tasks import TASKS

        return iter(TASKS)


def build_step(steps: argparse._SubParsersAction, name: str, run: object, text: str) -> argparse.ArgumentParser:
    """Adds `hplm build NAME` with the options of every step. `text` says in lower case what it does."""
    step = steps.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    step.add_argument("--store", type=Path, required=True, help="folder of the store")
    step.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: %(default)s)")
    step.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    step.add_argument("--json", action="store_true", help="end with one line of JSON")
    step.set_defaults(run=run)
    return step


def learn_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--learn",
        choices=("masked", "distil"),
        default="masked",
        help="how the lower layers learn the corpus: by predicting masked words, or by matching the original model's output "
        "(default: %(default)s)",
    )


def device_of(args: argparse.Namespace) -> torch.device:
    from hplm.engine.engine import resolve_device

    return resolve_device(args.device)


def refuse_given(args: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """Raises if options were given that have no effect here. The command sets `default_of`, its `get_default`."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) != args.default_of(name)]
    if given:
        raise InvalidInput(f"{', '.join(given)}: {reason}")
