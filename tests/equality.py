"""Defines when served logits are equal to the reference, for each precision."""

from __future__ import annotations

from collections import defaultdict

import numpy as np


class Comparison:
    """Collects answers and those of the reference by tenant, and compares them together."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)

    def add(self, tenant: str, served: np.ndarray, expected: np.ndarray) -> None:
        assert served.shape == expected.shape
        self._pairs[tenant].append((served, expected))

    def assert_equal(self, dtype: str) -> None:
        """Checks fp32 and int8 within 1e-3, and bf16 within 3 % of the logits' range.

        There the label is the same where the margin is larger. Answers in int8 are compared with products in 8 bits.
        """
        assert self._pairs
        for tenant, pairs in self._pairs.items():
            served, expected = (np.concatenate(side) for side in zip(*pairs, strict=True))
            error = np.abs(served - expected).max()
            if dtype in ("fp32", "int8"):
                assert error <= 1e-3, f"{tenant}: off by {error}"
                continue
            reach = 0.03 * (expected.max() - expected.min())
            assert error <= reach, f"{tenant}: off by {error}, allowed {reach}"
            best = np.sort(expected, axis=1)
            clear = best[:, -1] - best[:, -2] > reach
            assert clear.any()
            assert (served.argmax(1) == expected.argmax(1))[clear].all(), f"{tenant}: another label"
