"""How commands print rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def columns(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns rows below their heads. Columns whose cells begin like numbers stand right."""
    lines = [heads, *rows]
    cells = [[line[column] for line in lines] for column in range(len(heads))]
    for column in cells:
        width = max(map(len, column))
        is_number = len(column) > 1 and all(cell[:1] in "-0123456789" for cell in column[1:])
        column[:] = [cell.rjust(width) if is_number else cell.ljust(width) for cell in column]
    return "\n".join("  ".join(line).rstrip() for line in zip(*cells, strict=True))
