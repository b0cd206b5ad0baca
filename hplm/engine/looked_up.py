"""A looked-up request: what the lookup model finds for the upper model, and the bytes in which it travels."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hplm.arrays import Array

_SIZES = struct.Struct("<QIIII")  # tokens, texts, answer rows, passages, bytes of the passages


@dataclass(frozen=True)
class LookedUp:
    """The texts of a request, end to end."""

    lengths: Array  # tokens of each text, int32
    counts: Array  # answer rows of each text, int32
    addresses: Array  # of each token, int64
    segments: Array  # of each token, uint8
    spans: Array  # answer rows x 3, int32
    passages: tuple[str, ...] = ()  # one for each text, if the tenant's task answers from the pair

    @property
    def texts(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return len(self.addresses)

    def pack(self) -> bytes:
        passages = [passage.encode() for passage in self.passages]
        ends = np.cumsum([len(passage) for passage in passages], dtype=np.int32)
        size = int(ends[-1]) if passages else 0
        arrays = (self.addresses, self.lengths, self.counts, self.spans, ends, self.segments)
        sizes = _SIZES.pack(self.tokens, self.texts, len(self.spans), len(passages), size)
        return b"".join((sizes, *(array.tobytes() for array in arrays), *passages))

    @classmethod
    def unpack(cls, packed: bytes) -> LookedUp:
        """Reads what `pack` has written. Ignores bytes behind it."""
        tokens, texts, rows, count, size = _SIZES.unpack_from(packed)
        at = _SIZES.size

        def take(dtype: type[np.generic], length: int) -> Array:
            nonlocal at
            found = np.frombuffer(packed, dtype, length, at)
            at += found.nbytes
            return found

        addresses, lengths, counts = take(np.int64, tokens), take(np.int32, texts), take(np.int32, texts)
        spans, ends, segments = take(np.int32, 3 * rows).reshape(rows, 3), take(np.int32, count), take(np.uint8, tokens)
        joined = packed[at : at + size]
        starts = [0, *ends.tolist()]
        passages = tuple(joined[start:end].decode() for start, end in pairwise(starts))
        return cls(lengths, counts, addresses, segments, spans, passages)
