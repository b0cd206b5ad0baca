"""`python -m research.papers azure`: Azure's traces of functions as a trace for `hplm place` (AlpaServe's loads)."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.rows import Row, Rows, benchmark
from hplm.arrays import Array
from hplm.errors import MISFITS, InvalidInput
from hplm.simulate.arrivals import Lengths

MINUTES = 1440  # columns of a file of 2019: a day
LENGTHS = Lengths(64, 400, 3, 512)  # Azure's functions have no texts


@benchmark()
def azure(trace: Path, *, units: list[str], to: Path, seed: int = 0) -> Rows:
    """Writes a file of Azure's functions of 2019 or 2021 as JSONL for `hplm place --trace`.

    :param trace: `invocations_per_function_md...csv` or `AzureFunctionsInvocationTrace...txt`
    :param units: names of the units to which the functions go in turn, such as bert/law, or of tenants
    :param to: the file to write
    :param seed: of the times within a minute, and of the texts' lengths
    """
    rng = np.random.default_rng(seed)
    functions = _functions(trace, rng)
    arrival = np.concatenate([np.empty(0), *functions])
    if not len(arrival):
        raise InvalidInput(f"{trace} has no invocations")
    unit = np.repeat(np.arange(len(functions)) % len(units), list(map(len, functions)))
    tokens = LENGTHS.draw(len(arrival), rng)
    with to.open("w", encoding="utf-8") as file:
        for at in np.argsort(arrival, kind="stable").tolist():
            row = {"arrival": float(arrival[at] - arrival.min()), "tokens": int(tokens[at]), "unit": units[unit[at]]}
            file.write(json.dumps(row) + "\n")
    yield Row("requests", len(arrival))


def _functions(trace: Path, rng: np.random.Generator) -> Sequence[Array]:
    """Returns the seconds at which each function was called."""
    found: dict[str, list[float]] = {}
    with trace.open(encoding="utf-8", newline="") as file:
        for line, row in enumerate(csv.DictReader(file), 2):
            try:
                if "end_timestamp" in row:
                    found.setdefault(f"{row['app']} {row['func']}", []).append(
                        float(row["end_timestamp"]) - float(row["duration"])
                    )
                else:  # so many calls in each minute
                    minute = np.repeat(np.arange(MINUTES), [int(row[str(one)] or 0) for one in range(1, MINUTES + 1)])
                    found[f"{line}"] = (60 * (minute + rng.random(len(minute)))).tolist()
            except MISFITS as error:
                raise InvalidInput(f"{trace}, line {line} is none of Azure's ({error!r}): see AzurePublicDataset") from None
    return [np.array(own) for own in found.values()]
