"""Options that several commands share, with their help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import Argument, ArgumentCollection, CoercionError, Parameter, Token
from cyclopts.validators import Number

from hplm.errors import InvalidInput
from hplm.options import ENGINE_DTYPES, TABLE_DTYPES

if TYPE_CHECKING:
    import torch


def about(text: str, **more: Any) -> Parameter:
    """Returns the help of an option, and how else it is read."""
    return Parameter(help=text, **more)


def read(function: Any, **more: Any) -> Parameter:
    """Returns how an option is read from one word. If it is given again, the last one counts."""

    def converted(_: object, tokens: tuple[Token, ...]) -> Any:
        return function(tokens[-1].value)

    return Parameter(converter=converted, n_tokens=1, accepts_keys=False, consume_multiple=False, **more)


def numbers(given: str) -> list[int]:
    try:
        return [int(number) for number in given.split(",")]
    except ValueError:
        raise ValueError(f"{given!r}: give whole numbers, such as 0,1") from None


def read_whole_numbers(_app: object, _words: object, arguments: ArgumentCollection) -> None:
    """Refuses what is no whole number, in all options for one: cyclopts rounds it. Lets `1e3` be one."""
    for argument in arguments:
        if int in (argument.hint, *get_args(argument.hint)):
            argument.tokens = [token.evolve(value=_whole(argument, token)) for token in argument.tokens]


def _whole(argument: Argument, token: Token) -> str:
    try:
        number = float(token.value)
    except ValueError:
        return token.value  # cyclopts refuses it
    if not number.is_integer():
        raise CoercionError(f"{token.value!r}: give a whole number", argument=argument, token=token)
    return str(int(number)) if "e" in token.value.lower() else token.value


CORPUS = "files with one document a line, or JSONL, CSV or Parquet with `text`; text may be .gz or .zst"

Positive = Annotated[float, Parameter(validator=Number(gt=0, lt=math.inf))]
NotNegative = Annotated[float, Parameter(validator=Number(gte=0, lt=math.inf))]
AtLeastOne = Annotated[int, Parameter(validator=Number(gte=1))]
StoreFolder = Annotated[Path, about("folder of the store")]
Device = Annotated[str, about("auto, cpu, cuda or cuda:N")]
Seed = Annotated[int, about("seed of all random choices")]
TableDtype = Annotated[str, about("precision of the stored vectors", choices=TABLE_DTYPES)]
SERVED_DTYPE = "precision that will serve; auto measures as `hplm export` does, which prints the result"
ServedDtype = Annotated[str, about(SERVED_DTYPE, choices=("auto", *ENGINE_DTYPES))]
Picture = Annotated[Path | None, about("draw it into a .png, .svg or .pdf file")]
LEARN = (
    "how the lower layers learn the corpus: by predicting masked words (masked, the default), by matching the original model's "
    "output (distil), or of a decoder by predicting the next token (next)"
)
Learn = Annotated[Literal["masked", "distil", "next"] | None, about(LEARN)]
Text = Annotated[str, Parameter(allow_leading_hyphen=True)]
Words = Annotated[tuple[str, ...], read(lambda given: tuple(given.split(",")))]
Numbers = Annotated[tuple[int, ...], read(lambda given: tuple(numbers(given)))]


def _known_task(given: str) -> str:
    """Returns the name of a task. Tasks are imported on use, because they import numpy, which slows down `hplm --help`."""
    from hplm.tasks.tasks import TASKS

    if given not in TASKS:
        raise ValueError(f"{given!r}: choose from {', '.join(TASKS)}")
    return given


TaskName = Annotated[str | None, read(_known_task)]


def named_values(given: Sequence[str]) -> dict[str, str]:
    """Returns the values of --parameters by name."""
    pairs = [one.partition("=") for one in given]
    if wrong := [name for name, sign, _ in pairs if not sign]:
        raise InvalidInput(f"--parameters {wrong[0]}: give NAME=VALUE")
    return {name: value for name, _, value in pairs}


def device_of(name: str) -> torch.device:
    from hplm.engine.engine import resolve_device

    return resolve_device(name)


def refuse_given(reason: str, *groups: Any, **options: object) -> None:
    """Raises if options were given that have no effect here: those of a group that are not at their defaults, or these."""
    for group in groups:
        options |= {one.name: value for one in fields(group) if (value := getattr(group, one.name)) != one.default}
    given = [name for name, value in options.items() if value is not None and value is not False and value != ()]  # 0 is given
    names = [f"--{name.replace('_', '-')}" for name in given]
    if names:
        raise InvalidInput(f"{', '.join(names)}: {reason}")
