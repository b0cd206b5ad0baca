"""Sizes of products: how many rows to compute, so that there are few different numbers."""

from __future__ import annotations

LEAST_STEP = 16


def rounded_up(rows: int) -> int:
    """Returns a multiple of 16, from 128 rows on at most an eighth more.

    oneDNN takes up to some milliseconds to prepare a product for a number of rows that is new.
    """
    step = max(LEAST_STEP, 1 << max(0, (rows - 1).bit_length() - 4))
    return -(-rows // step) * step
