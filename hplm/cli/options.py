"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CORPUS = "one document of any length in a line, or JSONL with `text`; plain, .gz or .zst"


class TaskNames:
    """The names of the tasks, imported when they are needed: tasks import numpy, which would make `hplm --help` slower."""

    def __iter__(self) -> Iterator[str]:
        from hplm.tasks import TASKS

        return iter(TASKS)


def learn_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--learn",
        choices=("masked", "distil"),
        default="masked",
        help="how the lower layers learn the corpus: they predict masked words, or learn to match the original model "
        "(default: %(default)s)",
    )


def device_of(args: argparse.Namespace) -> torch.device:
    from hplm.engine.engine import resolve_device

    return resolve_device(args.device)
