"""The rows that a benchmark yields, and types of options that several benchmarks share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Parameter
from cyclopts.validators import Number

from hplm.errors import InvalidInput

SHORTEST = 3  # tokens of a text: [CLS], a word, [SEP]

Whole = Annotated[int, Parameter(validator=Number(gt=0))]
Positive = Annotated[float, Parameter(validator=Number(gt=0, lt=math.inf))]
Count = Annotated[int, Parameter(validator=Number(gte=0))]
NotNegative = Annotated[float, Parameter(validator=Number(gte=0, lt=math.inf))]


def _ascending(_: object, pair: tuple[float, float]) -> None:
    if pair[0] > pair[1]:
        raise ValueError("Give the least first.")


Range = Annotated[tuple[Positive, Positive], Parameter(validator=_ascending)]
Size = Literal["minilm", "bert-base", "modernbert-base", "toy"]  # of a model: `testing.random_store.SIZES`
Dtype = Literal["auto", "fp32", "bf16"]  # `hplm.options.LAYER_DTYPES`
EngineDtype = Literal["auto", "fp32", "bf16", "int8"]

ONLY_QUICK = Parameter(parse=False)  # no option: --quick alone gives another value

# Options that several commands have, with their help.
ModelSize = Annotated[Size, Parameter(help="of the model")]
Tokens = Annotated[int, Parameter(validator=Number(gt=0), help="of a text")]
Seconds = Annotated[float, Parameter(validator=Number(gt=0, lt=math.inf), help="of each measurement")]
ServedDtype = Annotated[EngineDtype, Parameter(help="precision of the engine")]
Device = Annotated[str, Parameter(help="auto, cpu, cuda or cuda:N")]
OtherModel = Annotated[str, Parameter(help="Hugging Face name or folder of another BERT than MiniLM")]


@dataclass(frozen=True)
class Row:
    """A figure. Slashes in its name nest the JSON: `rates/1.5/das/utility`. A ratio follows the figures that it compares."""

    name: str
    value: float | str | None  # None: there was nothing to measure
    unit: str = ""
    least: float | None = None  # targets
    most: float | None = None
    spread: tuple[float, float] | None = None  # the least and the most of several rounds

    @property
    def divided(self) -> tuple[list[str], float | None, list[str]]:
        """Returns the first number among the parts of the name, and the parts before and behind it."""
        parts = self.name.split("/")
        at = next((at for at, part in enumerate(parts) if part.replace(".", "", 1).isdecimal()), None)
        return (parts, None, []) if at is None else (parts[:at], float(parts[at]), parts[at + 1 :])

    @property
    def x(self) -> float | None:
        return self.divided[1]

    @property
    def series(self) -> str:
        """Returns the name without that number."""
        before, _, after = self.divided
        return "/".join(before + after)

    @property
    def target(self) -> str:
        """Returns the target in words, or an empty string."""
        if self.least is not None:
            return f"at least {self.least:g}"
        return f"at most {self.most:g}" if self.most is not None else ""

    @property
    def missed(self) -> bool:
        """Whether the figure misses its target. A figure that was not measured does."""
        if not self.target:
            return False
        if not isinstance(self.value, (int, float)):
            return True
        return not self.value >= self.least if self.least is not None else not self.value <= (self.most or 0.0)


Rows = Iterator[Row]


def rows_of(figures: Mapping[str, Any], targets: Mapping[str, tuple[str, float]] | None = None, at: str = "") -> Rows:
    """Yields nested figures as rows. `targets`: `>=` or `<=`, and a number, by the name of the figure."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from rows_of(value, targets, f"{at}{name}/")
        else:
            bound, number = (targets or {}).get(at + name, ("", 0.0))
            least, most = (number if bound == sign else None for sign in (">=", "<="))
            yield Row(f"{at}{name}", ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value, "", least, most)


def rows_of_rounds(rounds: Sequence[Mapping[str, float]], targets: Mapping[str, tuple[str, float]] | None = None) -> Rows:
    """Yields the median of each figure, with the spread of several rounds. `targets`: as in `rows_of`."""
    for row in rows_of({name: median(found[name] for found in rounds) for name in rounds[0]}, targets):
        values = [found[row.name] for found in rounds]
        yield replace(row, spread=(min(values), max(values)) if len(rounds) > 1 else None)


Benchmark = TypeVar("Benchmark", bound=Callable[..., Rows])
QUICK: dict[object, dict[str, object]] = {}  # of each function: names may be those of other packages too


def benchmark(**quick: object) -> Callable[[Benchmark], Benchmark]:
    """Marks the function of a benchmark. `quick`: the values that --quick gives to its options."""

    def mark(function: Benchmark) -> Benchmark:
        QUICK[function] = quick
        return function

    return mark


def say(what: str) -> None:
    """Tells the person who waits what is measured now."""
    print(what, file=sys.stderr, flush=True)


def expect_text(tokens: int, size: str, option: str = "tokens") -> None:
    from testing.random_store import SIZES

    positions = SIZES[size].positions
    if not SHORTEST <= tokens <= positions:
        raise InvalidInput(f"--{option} {tokens}: a text for this size of model has {SHORTEST} to {positions} tokens")
