"""Options that several commands have, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CORPUS = "one document a line, however long, or JSONL with `text`; plain, .gz or .zst"


class TaskNames:
    """The names of the tasks, when they are needed: numpy, which tasks import, would make `hplm --help` slower."""

    def __iter__(self) -> Iterator[str]:
        from hplm.tasks import TASKS

        return iter(TASKS)


def learn_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--learn",
        choices=("masked", "distil"),
        default="masked",
        help="how the lower layers learn the corpus: they guess masked words of it, or say of it what the original model says "
        "(default: %(default)s)",
    )


def device_of(args: argparse.Namespace) -> torch.device:
    from hplm.engine.engine import resolve_device

    return resolve_device(args.device)
