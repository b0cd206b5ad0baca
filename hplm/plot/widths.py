"""The number of bytes that a stored vector takes. No torch here: lookup starts without it."""

from __future__ import annotations

from hplm.errors import InvalidInput
from hplm.options import TABLE_DTYPES

SCALE_AND_OFFSET = 8  # bytes: two fp32 behind the 8-bit numbers of a vector


def vector_bytes(dtype: str, hidden: int) -> int:
    check_dtype(dtype)
    return hidden + SCALE_AND_OFFSET if dtype == "int8" else 2 * hidden


def check_dtype(name: str) -> None:
    if name not in TABLE_DTYPES:
        raise InvalidInput(f"unknown table dtype {name!r}: choose {', '.join(TABLE_DTYPES)}")
