"""Checks of options that several commands share. They run before any work begins."""

from __future__ import annotations

from hplm.errors import InvalidInput


def check_keep(keep: float | None) -> None:
    """Refuses what is no share. None: the default of a command."""
    if keep is not None and not 0.0 <= keep <= 1.0:
        raise InvalidInput(f"keep {keep}: give a share between 0 and 1")


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**64:
        raise InvalidInput(f"seed {seed}: give a whole number from 0 to 2^64 - 1")
