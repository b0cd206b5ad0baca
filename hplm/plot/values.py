"""Forms in which a table stores vectors: in 16 bits a number, or in 8 bits with a scale and an offset for each vector.

The engine and the reference read the same stored numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hplm.options import TABLE_DTYPES
from hplm.plot.table import SCALE_AND_OFFSET


class SixteenBit:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, vectors: Tensor) -> Tensor:
        """Turns fp32 (... x hidden) into uint8 (vectors x `vector_bytes`)."""
        return vectors.reshape(-1, vectors.shape[-1]).to(self._dtype).contiguous().view(torch.uint8)

    def typed(self, stored: Tensor) -> Tensor:
        """Returns a view of uint8 (vectors x `vector_bytes`) in the stored type, without a copy."""
        return stored.view(self._dtype)

    def decode(self, typed: Tensor) -> Tensor:
        """Returns fp32 (vectors x hidden)."""
        return typed.float()

    def bags(self, typed: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns in `dtype` the sums of the vectors that each row of `index` names, on the vectors' device.

        An fp32 engine, which must be exact, sums in fp32. A 16-bit engine takes the fused 16-bit sum.
        """
        tokens, n = index.shape
        if dtype == torch.float32:
            vectors = typed.index_select(0, index.T.flatten()).view(n, tokens, -1)
            total = vectors[0].float()
            for others in vectors[1:]:
                total += others
            return total
        ends = torch.arange(0, tokens * n + 1, n, device=index.device)
        sums = F.embedding_bag(index.flatten(), typed, ends, mode="sum", include_last_offset=True)
        # Direct conversion between the 16-bit formats is slower.
        return sums if sums.dtype == dtype else sums.float().to(dtype)


class EightBit:
    """Stores each vector in 255 steps between its own lowest and highest number."""

    def encode(self, vectors: Tensor) -> Tensor:
        return torch.ops.quantized.embedding_bag_byte_prepack(vectors.reshape(-1, vectors.shape[-1]).float().contiguous())

    def typed(self, stored: Tensor) -> Tensor:
        return stored

    def decode(self, typed: Tensor) -> Tensor:
        numbers, tail = typed[:, :-SCALE_AND_OFFSET], typed[:, -SCALE_AND_OFFSET:]
        scale_and_offset = tail.contiguous().view(torch.float32)
        return numbers.float() * scale_and_offset[:, :1] + scale_and_offset[:, 1:]

    def bags(self, typed: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        if typed.device.type == "cpu":
            bag = torch.ops.quantized.embedding_bag_byte_rowwise_offsets
            return bag(typed, index, None, False, 0, False, None, None, False).to(dtype)
        return self.decode(typed.index_select(0, index.flatten())).view(*index.shape, -1).sum(1).to(dtype)


Coding = SixteenBit | EightBit
CODINGS: dict[str, Coding] = dict(
    zip(TABLE_DTYPES, (SixteenBit(torch.float16), SixteenBit(torch.bfloat16), EightBit()), strict=True)
)
LEAST_COSINE = 0.999  # between a vector and its stored form


def closeness(vectors: Tensor, decoded: Tensor) -> float:
    """Returns the lowest cosine between vectors and their stored form. Zeros stored as zeros count as equal."""
    cosines = F.cosine_similarity(vectors.float(), decoded, dim=-1)
    both_zero = (vectors == 0).all(-1) & (decoded == 0).all(-1)
    return float(torch.where(both_zero, 1.0, cosines).min()) if len(cosines) else 1.0
