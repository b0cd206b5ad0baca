"""Options that several benchmarks have, and their checks, which run before anything is built."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

from hplm.errors import InvalidInput
from hplm.options import ENGINE_DTYPES

SIZE_NAMES = ("minilm", "bert-base", "toy")  # defined in `testing.random_store.SIZES`
DTYPES = ("auto", *ENGINE_DTYPES)
SHORTEST = 3  # [CLS], a word, [SEP]


class _Quick(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object) -> None:
        vars(namespace).update(self.const)


def benchmark(
    kinds: argparse._SubParsersAction,
    name: str,
    run: Callable[[argparse.Namespace], dict],
    help: str,
    description: str,
    **quick: object,
) -> argparse.ArgumentParser:
    """Adds `hplm bench NAME`. `run` returns the figures, which --json prints as one line. Without --json, `run` prints them.

    `quick`: the values that --quick gives to options of the benchmark. Options behind --quick count.
    """
    parser = kinds.add_parser(name, help=help, description=description)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    if quick:
        about = "little of everything: the figures mean nothing"
        parser.add_argument("--quick", action=_Quick, nargs=0, const=quick, help=about)
    parser.set_defaults(run=run)
    return parser


def size_option(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--size", choices=SIZE_NAMES, default=default, help="size of the model (default: %(default)s)")


def tokens_option(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--tokens", type=int, default=default, help="tokens of a text (default: %(default)s)")


def seconds_option(parser: argparse.ArgumentParser, default: float, of: str) -> None:
    parser.add_argument("--seconds", type=float, default=default, help=f"seconds {of} (default: %(default)s)")


def dtype_option(parser: argparse.ArgumentParser, of: str = "of the engine", known: Sequence[str] = ENGINE_DTYPES) -> None:
    parser.add_argument("--dtype", choices=("auto", *known), default="auto", help=f"precision {of} (default: %(default)s)")


def whole_numbers(given: str) -> list[int]:
    """The type of an option that takes one number or several: `16`, `1,10,100`."""
    parts = given.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{given!r}: give whole numbers above 0, such as 16 or 1,10,100")
    return [int(part) for part in parts]


def expect_above_zero(**options: float) -> None:
    for name, value in options.items():
        if not 0 < value < math.inf:
            raise InvalidInput(f"--{name.replace('_', '-')} {value}: give a number above 0")


def expect_text(tokens: int, positions: int, option: str = "tokens") -> None:
    if not SHORTEST <= tokens <= positions:
        raise InvalidInput(f"--{option} {tokens}: a text for this size of model has {SHORTEST} to {positions} tokens")


def positions_of(size: str) -> int:
    """Returns the number of tokens of the longest text for this size of model."""
    from testing.random_store import SIZES

    return SIZES[size].positions
