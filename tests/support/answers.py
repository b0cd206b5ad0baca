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
        """Checks fp32 within 1e-3, int8 within 1e-3 of the logits' range and mostly within 1e-5, and bf16 within 3 % of it.

        There the label is the same where the margin is larger. Answers in int8 are compared with products in 8 bits. Where an
        activation lies between two of its 8-bit steps, the last bit of a sum decides which one it takes.
        """
        assert self._pairs
        certain = 0
        for tenant, pairs in self._pairs.items():
            served, expected = (np.concatenate(side) for side in zip(*pairs, strict=True))
            errors = np.abs(served - expected)
            error = errors.max()
            if dtype == "fp32":
                assert error <= 1e-3, f"{tenant}: off by {error}"
                continue
            if dtype == "int8":
                allowed = 1e-3 * (expected.max() - expected.min())
                assert error <= allowed and np.median(errors) <= 1e-5, f"{tenant}: off by {error}, {np.median(errors)}"
                continue
            reach = 0.03 * (expected.max() - expected.min())
            assert error <= reach, f"{tenant}: off by {error}, allowed {reach}"
            best = np.sort(expected, axis=1)
            clear = best[:, -1] - best[:, -2] > reach
            certain += int(clear.sum())
            assert (served.argmax(1) == expected.argmax(1))[clear].all(), f"{tenant}: another label"
        assert certain or dtype in ("fp32", "int8"), "no label is far enough before the others"
