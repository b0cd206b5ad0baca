"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table. A cell of None is empty."""
    lines = [names, ["---"] * len(names), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:,.0f}" if value >= 1000 or isinstance(value, int) else f"{value:.4g}"
    return "" if value is None else str(value)
