"""Options that several commands have, and what they mean."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CORPUS = "one document a line, however long, or JSONL with `text`; plain, .gz or .zst"
DTYPES = ("fp16", "bf16", "int8")
MIN_TOKENS = 50_000


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
