"""`python -m research.papers served_students`: draws the figures of `hplm bench students --json` for docs/students.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.rows import Rows, benchmark, rows_of
from builder.pictures import check_picture
from demo.picture import Bars, draw_bars
from hplm.errors import MISFITS, InvalidInput

NAMES = {"minilm": "MiniLM", "bert-base": "BERT-base"}


@benchmark()
def served_students(figures: Path, *, to: Path) -> Rows:
    """Draws what students take and serve, beside the full stack, and prints it.

    :param figures: the output of `hplm bench students --json`
    :param to: the picture to write
    """
    check_picture(to)
    try:
        bars = bars_of(json.loads(figures.read_text("utf-8").strip().splitlines()[-1]))
    except MISFITS as error:
        raise InvalidInput(f"{figures} is no output of `hplm bench students --json`: {error!r}") from None
    draw_bars(bars, to)
    yield from rows_of(bars)


def bars_of(found: Mapping[str, Any]) -> Bars:
    """Returns a panel for each row of the table in docs/students.md. Of several students, all are drawn, and one alone."""
    case = found["case"]
    sizes: dict[str, str] = {name.replace("-", "_"): str(NAMES.get(name, name)) for name in case["size"]}
    teams = {"one student": "students-1", f"{case['students']} students": f"students-{case['students']}"}

    def ratios(of: str, name: str) -> dict[str, dict[str, float]]:
        return {
            label: {
                f"{size}, {tokens} tokens": found[at][of][str(tokens)][f"{name}_{team}_over_full"]
                for at, size in sizes.items() for tokens in case["tokens"]
            }
            for label, team in teams.items()
        }  # fmt: skip

    ways = {**teams, "as the governor chooses": "adaptive", "full stack": "full"}
    in_time = {label: {size: found[at]["burst"]["in_time"][way] for at, size in sizes.items()} for label, way in ways.items()}
    return {
        "time of a lone text, over the full stack's": ratios("one", "latency"),
        "texts a second in full batches, over the full stack's": ratios("batches", "throughput"),
        "in time, in a burst": in_time,
    }
