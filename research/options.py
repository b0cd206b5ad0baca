"""The research commands and their options, which cyclopts reads from signatures and dataclasses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, get_args

from cyclopts import App, CycloptsError, Parameter, Token

from hplm.errors import HplmError, InvalidInput


def with_commas(kind: Any, tokens: Sequence[Token]) -> tuple[Any, ...]:
    """Reads several values: `4,16`."""
    of = get_args(kind)[0]
    return tuple(of(part) for token in tokens for part in token.value.split(","))


SEVERAL = Parameter(converter=with_commas, n_tokens=1, negative=())
FLAG = Parameter(negative=())
JSON = Parameter("--json", negative=())
FLAT = Parameter(name="*")


def command(name: str, about: str | None) -> App:
    return App(name=f"python -m {name}", help=about, help_format="plaintext", version_flags=[], result_action="return_value")


def run(app: App, arguments: Sequence[str] | None) -> int:
    """Runs a command. Returns the exit status."""
    return ended(app.name[0].rpartition(".")[2], lambda: app(arguments, exit_on_error=False, print_error=False))


def ended(name: str, call: Callable[[], object]) -> int:
    """Returns the exit status of a call: 1 if it fails, after its message."""
    try:
        call()
    except (HplmError, CycloptsError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{name}: {error.filename}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; give the same command to continue", file=sys.stderr)
        return 130
    return 0


def expect_numbers_above_zero(options: Any) -> None:
    """Raises if a number in a dataclass of options, or in one of its tuples, is not finite and above 0."""
    for name, value in asdict(options).items():
        values = value if isinstance(value, tuple) else (value,)
        if not values or not all(isinstance(one, str) or 0 < one < float("inf") for one in values):
            raise InvalidInput(f"--{name.replace('_', '-')} {value}: give numbers above 0")
