"""A looked-up request: what the lookup model finds for the upper model, and the bytes in which it travels."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array

_SIZES = struct.Struct("<QIII")  # tokens, texts, answer rows, passages


@dataclass(slots=True)
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
        arrays = [self.addresses, self.lengths, self.counts, self.spans, self.segments]
        if passages:
            arrays.append(np.array([len(passage) for passage in passages], dtype=np.int32))
        sizes = _SIZES.pack(self.tokens, self.texts, len(self.spans), len(passages))
        return b"".join((sizes, *(array.tobytes() for array in arrays), *passages))

    @classmethod
    def unpack(cls, packed: bytes) -> LookedUp:
        """Reads what `pack` has written. Ignores bytes behind it."""
        tokens, texts, rows, passages = _SIZES.unpack_from(packed)
        lengths = _SIZES.size + 8 * tokens
        counts = lengths + 4 * texts
        spans = counts + 4 * texts
        segments = spans + 12 * rows
        return cls(
            lengths=np.frombuffer(packed, np.int32, texts, lengths),
            counts=np.frombuffer(packed, np.int32, texts, counts),
            addresses=np.frombuffer(packed, np.int64, tokens, _SIZES.size),
            segments=np.frombuffer(packed, np.uint8, tokens, segments),
            spans=np.frombuffer(packed, np.int32, 3 * rows, spans).reshape(rows, 3),
            passages=_passages(packed, segments + tokens, passages) if passages else (),
        )


def _passages(packed: bytes, at: int, count: int) -> tuple[str, ...]:
    """Returns strings, whose lengths stand before them."""
    sizes = np.frombuffer(packed, np.int32, count, at)
    ends = (at + sizes.nbytes + np.cumsum(sizes)).tolist()
    return tuple(packed[end - size : end].decode() for size, end in zip(sizes.tolist(), ends, strict=True))
