"""A request between the two models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PAD = -1


@dataclass(frozen=True)
class LookedUp:
    """A request between the two models: its texts as rectangles. Short texts are filled up with PAD."""

    addresses: np.ndarray  # texts x tokens, int64
    segments: np.ndarray  # texts x tokens, uint8; 0 beyond the end
    spans: np.ndarray  # texts x answer rows x 3, int32

    def text(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the addresses, segments and spans of one text.

        They are copies: a waiting text keeps only its own part of the rectangles in memory.
        """
        tokens, rows = _used(self.addresses[index]), _used(self.spans[index, :, 1])
        return self.addresses[index, :tokens].copy(), self.segments[index, :tokens].copy(), self.spans[index, :rows].copy()


def _used(row: np.ndarray) -> int:
    """How much of a row is not padding."""
    return int((row != PAD).sum())
