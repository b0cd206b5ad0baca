"""Options that no benchmark can work with, refused before it exports a model or starts a server."""

from __future__ import annotations

import math

from hplm.errors import InvalidInput

SHORTEST = 3  # [CLS], a word, [SEP]


def expect_above_zero(**options: float) -> None:
    for name, value in options.items():
        if not 0 < value < math.inf:
            raise InvalidInput(f"--{name.replace('_', '-')} {value}: give a number above 0")


def expect_text(tokens: int, positions: int, option: str = "tokens") -> None:
    if not SHORTEST <= tokens <= positions:
        raise InvalidInput(f"--{option} {tokens}: a text of this size of model has {SHORTEST} to {positions}")
