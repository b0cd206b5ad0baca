"""A request between the two models."""

from __future__ import annotations

from dataclasses import dataclass

from hplm.arrays import Array

PAD = -1


@dataclass(frozen=True)
class LookedUp:
    """A request between the two models: its texts as rectangles. Short texts are filled up with PAD."""

    addresses: Array  # texts x tokens, int64
    segments: Array  # texts x tokens, uint8; 0 beyond the end
    spans: Array  # texts x answer rows x 3, int32

    @property
    def tokens(self) -> int:
        """The number of tokens of all texts."""
        return _used(self.addresses)

    def text(self, index: int) -> tuple[Array, Array, Array]:
        """Returns the addresses, segments and spans of one text.

        They are copies: a waiting text keeps only its own part of the rectangles in memory.
        """
        tokens, rows = _used(self.addresses[index]), _used(self.spans[index, :, 1])
        return self.addresses[index, :tokens].copy(), self.segments[index, :tokens].copy(), self.spans[index, :rows].copy()


def _used(values: Array) -> int:
    """Returns how many of the values are not padding."""
    return int((values != PAD).sum())
