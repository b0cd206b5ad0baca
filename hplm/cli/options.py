"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CORPUS = "files with one document a line, or JSONL with a field `text`; plain, .gz or .zst"


class TaskNames:
    """The names of the tasks. They are imported on first use, because tasks import numpy, which slows down `hplm --help`."""

    def __iter__(self) -> Iterator[str]:
        from hplm.tasks import TASKS

        return iter(TASKS)


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
