"""n-grams as sortable numbers: exact, no hash."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hplm.errors import InvalidInput


@dataclass(frozen=True)
class KeySpace:
    """Packs a window of id + 1 (0 = absent) into one uint64, first token highest."""

    vocabulary: int
    n: int

    def __post_init__(self) -> None:
        if self.n * self.bits > 64:
            raise InvalidInput(
                f"{self.n}-grams over {self.vocabulary} tokens need {self.n * self.bits} bits, a key has 64: "
                "use a smaller --window"
            )

    @property
    def bits(self) -> int:
        return self.vocabulary.bit_length()

    def pack(self, windows: np.ndarray) -> np.ndarray:
        keys = np.zeros(len(windows), dtype=np.uint64)
        for position in range(self.n):
            keys = (keys << np.uint64(self.bits)) | windows[:, position].astype(np.uint64)
        return keys

    def unpack(self, keys: np.ndarray) -> np.ndarray:
        mask = np.uint64((1 << self.bits) - 1)
        shifts = np.arange(self.n - 1, -1, -1, dtype=np.uint64) * np.uint64(self.bits)
        return ((keys[:, None] >> shifts) & mask).astype(np.int64)

    def mask(self, keep: np.ndarray) -> np.uint64:
        """The bits of a key that belong to the kept positions: `key & mask` is the key of the shrunken window."""
        token = (1 << self.bits) - 1
        return np.uint64(sum(token << (self.bits * (self.n - 1 - i)) for i in range(self.n) if keep[i]))

    def unigrams(self) -> np.ndarray:
        """The keys of all tokens alone, in order of id."""
        ids = np.arange(1, self.vocabulary + 1, dtype=np.uint64)
        return ids << np.uint64(self.bits * (self.n - 1 - self.n // 2))
