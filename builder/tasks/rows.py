"""Reads files row by row: JSON lines, CSV and Parquet, recognised by their names. Each row becomes a line of JSON."""

from __future__ import annotations

import csv
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from builder.tables.text_files import LONGEST_LINE, Progress, check_stays, content_suffix, raw_lines
from builder.tasks.columns import AS_TRAINED, Columns
from hplm.errors import InvalidInput, some

Row = dict[str, Any]
T = TypeVar("T")
JSON_CELLS = "labels", "tokens", "tags", "answers"  # of a CSV: each holds a list or an object
KNOWN = "text", "text_pair", "label", *JSON_CELLS
ROWS_AT_ONCE = 1024
SAID = 40  # characters of a wrong value in an error
SEPARATORS = ",;\t"  # the one that is most often in the header counts
SAVE_AS = "save it as JSON lines (.jsonl), CSV (.csv) or Parquet (.parquet)"


def from_json(line: str, form: type[T]) -> T:
    """Returns what a line says. Raises a MsgspecError if it is not of this form."""
    try:
        return msgspec.json.decode(line, type=form)
    except RecursionError:
        raise msgspec.DecodeError("it has lists or objects within each other, too deep to be read") from None


def is_table(path: Path) -> bool:
    return content_suffix(path) in (".csv", ".tsv", ".parquet")


def rows(
    path: Path, fields: tuple[str, ...], columns: Columns = AS_TRAINED, *, progress: Progress | None = None,
    has_label: bool = True, is_number: bool = False,
) -> Iterator[tuple[int, str]]:  # fmt: skip
    """Yields (number, JSON) of each row, with the names of `fields`: that of the text comes first, that of the label last.

    Lines of text are yielded as they are. `has_label`: whether the file must have one. `is_number`: whether it is a number.
    """
    if not is_table(path) and not columns.given:
        yield from lines(path, progress)
        return
    names = zip(("text", "pair", "label"), (fields[0], "text_pair", fields[-1]), vars(columns).values(), strict=True)
    wanted = [(f"--{kind}-column", own, column or own, column is not None) for kind, own, column in names]
    for number, row in _found(path, progress):
        if isinstance(row, str):
            yield number, row
            continue
        chosen = {name: row[name] for name in KNOWN if name in row}
        for option, own, column, is_given in wanted:
            if column in row:
                chosen[own] = row[column]
                continue
            if own == fields[0]:
                is_missing = has_label or is_given or not chosen.keys() & {"text", "tokens"}
            else:
                is_missing = (is_given and is_table(path)) if own == "text_pair" else has_label
            if is_missing:
                known = some([repr(name[:SAID]) for name in row]) or "none"
                raise InvalidInput(
                    f"{path}:{number}: there is no column {column!r}, but {known}: rename one, or name it with {option}, where "
                    "the command has it"
                )
        if path.suffix != ".parquet" and is_table(path):
            chosen = _of_cells(path, number, chosen, (*JSON_CELLS, "label") if is_number else JSON_CELLS)
        yield number, msgspec.json.encode(chosen).decode()


def lines(path: Path, progress: Progress | None = None) -> Iterator[tuple[int, str]]:
    """Yields (number, line) of the lines that are not blank, counted from 1."""
    return ((number, line) for number, raw in enumerate(_decoded(path, progress), start=1) if (line := raw.strip()))


def _found(path: Path, progress: Progress | None) -> Iterable[tuple[int, Row | str]]:
    """Returns the rows; a line that is no JSON object stays a line."""
    if path.suffix == ".parquet":
        return _parquet(path, progress)
    return _cells(path, progress) if is_table(path) else _objects(path, progress)


def _objects(path: Path, progress: Progress | None) -> Iterator[tuple[int, Row | str]]:
    for number, line in lines(path, progress):
        try:
            yield number, from_json(line, Row)
        except msgspec.MsgspecError:
            yield number, line


def _of_cells(path: Path, number: int, row: Row, read: tuple[str, ...]) -> Row:
    """Returns a row of a CSV with its lists and numbers. An empty cell is no second text."""
    found = {name: cell for name, cell in row.items() if cell or name != "text_pair"}
    for name in found.keys() & set(read):
        try:
            found[name] = from_json(found[name], object)
        except msgspec.DecodeError as error:
            like = "0.5" if name == "label" else '["...", "..."]'
            raise InvalidInput(f"{path}:{number}: column {name!r} needs JSON in a CSV, such as {like}: {error}") from None
    return found


def _cells(path: Path, progress: Progress | None) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(LONGEST_LINE)
    content = _decoded(path, progress)
    first = next(content, "")
    reader = csv.reader(chain([first], content), delimiter=max(SEPARATORS, key=first.count), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if twice := next((name for name, count in Counter(header).items() if count > 1), None):
            raise InvalidInput(f"{path}: two columns are named {twice[:SAID]!r}: rename one")
        for cells in filter(any, reader):
            if len(cells) != len(header):
                raise InvalidInput(
                    f"{path}:{reader.line_num}: {len(cells)} cells, and the first line names {len(header)} columns: put texts "
                    "with separators in double quotes"
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise InvalidInput(f"{path}:{reader.line_num}: {error}: write a double quote in a quoted text twice") from None


def _parquet(path: Path, progress: Progress | None) -> Iterator[tuple[int, Row]]:
    check_stays(path)
    try:
        import polars  # pyarrow's newest needs another numpy than the embedded Triton
    except ImportError:
        raise InvalidInput(
            f"{path} needs the package polars: install it with `pip install 'hplm[parquet]'`, or save it as CSV or JSON lines"
        ) from None
    try:
        batches = polars.scan_parquet(path, glob=False).collect_batches(chunk_size=ROWS_AT_ONCE, maintain_order=True)
        yield from enumerate(chain.from_iterable(batch.iter_rows(named=True) for batch in batches), start=1)
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException) as error:
        raise InvalidInput(f"{path} is truncated or no Parquet file ({error}): download or write it again") from None
    if progress is not None:
        progress(path.stat().st_size)


def _decoded(path: Path, progress: Progress | None = None) -> Iterator[str]:
    """Yields the lines with their ends."""
    for number, raw in enumerate(raw_lines(path, progress), start=1):
        if number == 1 and raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise InvalidInput(f"{path} is in UTF-16: convert it to UTF-8, such as by `iconv -f UTF-16 -t UTF-8`")
        if number == 1 and raw.startswith(b"PAR1"):
            raise InvalidInput(f"{path} is a Parquet file: let its name end in .parquet")
        if b"\0" in raw or (number == 1 and raw.startswith(b"PK\3\4")):
            raise InvalidInput(f"{path}:{number}: a binary file, not text: {SAVE_AS}")
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{path}:{number}: not valid UTF-8 (byte {error.start + 1}): convert the file") from None
