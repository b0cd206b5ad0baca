"""Attention over cached keys: new tokens of each sequence see all tokens before them, and those before them only."""

from __future__ import annotations

import ctypes
from functools import cache
from inspect import signature
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hplm.arrays import Array
from hplm.compiled import HOW, kernel, number_fields, pointer_fields, vectors
from hplm.generation.cache import CUDA_BLOCK, Cache, places_of
from hplm.model.attention import CUDA_DTYPES, CUDA_HEADS
from hplm.model.config import BackboneConfig
from hplm.model.layer import Attend
from hplm.model.tensors import sent

STEP = 16  # numbers of a head are a multiple of it, as in kernel.c
WORTH = 1 << 16  # multiplications that are worth another thread


class Chunks(NamedTuple):
    """The new tokens of each sequence, which lie together in the step. Single tokens come first."""

    table: Array  # a row for each sequence with the blocks of its keys and values
    before: Array  # how many of its tokens are in the cache
    counts: Array  # how many are new


def attention_over(config: BackboneConfig, cache: Cache, chunks: Chunks, repeatable: bool = False) -> Attend:
    """Returns the attention of a step.

    `repeatable`: a sequence's numbers must not depend on the others of the step, even if that takes longer.
    """
    if reads_blocks(config, cache):
        return BlockAttention(config, cache, chunks, repeatable)
    return CachedAttention(config, cache, chunks)


@cache
def cuda_options() -> frozenset[str]:
    """Returns what torch's kernel for CUDA can be asked for. Older versions of torch know less."""
    from torch.nn.attention.varlen import varlen_attn  # initialises CUDA's kernels

    return frozenset(signature(varlen_attn).parameters)


def reads_blocks(config: BackboneConfig, cache: Cache) -> bool:
    """Whether torch's kernel for CUDA takes the blocks of this cache."""
    on_cuda = cache.device.type == "cuda" and cache.dtype in CUDA_DTYPES
    takes = config.head_size in CUDA_HEADS and cache.block % CUDA_BLOCK == 0
    return on_cuda and takes and "block_table" in cuda_options()


class CachedAttention:
    """Writes the keys and values of new tokens into the cache, and attends to them and to those before them.

    Where the compiled kernel can, it computes all chunks of one token in one call, and reads their blocks where they lie. The
    keys of other chunks are gathered first.
    """

    def __init__(self, config: BackboneConfig, cache: Cache, chunks: Chunks) -> None:
        self._cache = cache
        self._head = config.head_size
        self._kv_heads = config.key_width // config.head_size
        self._group = config.heads // self._kv_heads
        table, before, counts = chunks
        lengths = before + counts
        self._places = sent(places_of(table, cache.block, before, counts), cache.device)
        singles = int((counts == 1).sum()) if has_kernel(cache, self._head) else 0
        assert (counts[:singles] == 1).all()  # they come first
        self._table, self._lengths = table[:singles], lengths[:singles]
        self._counts: list[int] = [singles, *counts[singles:].tolist()]
        gathered = places_of(table[singles:], cache.block, np.zeros_like(before)[singles:], lengths[singles:])
        sizes: list[int] = lengths[singles:].tolist()
        self._seen = sent(gathered, cache.device).split_with_sizes(sizes)  # the places that each other chunk sees
        others: zip[tuple[int, int]] = zip(before[singles:].tolist(), counts[singles:].tolist(), strict=True)
        self._masks = [self._mask(old, new) if old and new > 1 else None for old, new in others]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = _written(self._cache, layer, self._places, key, value)
        first, *others = query.split_with_sizes(self._counts)
        attended: list[Tensor] = []
        if len(first):
            attended.append(attend_singles(first, keys, values, self._table, self._cache.block, self._lengths, self._head))
        for own, seen, mask in zip(others, self._seen, self._masks, strict=True):
            attended.append(self._attend(own, keys.index_select(0, seen), values.index_select(0, seen), mask))
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        count, width = query.shape
        key = key.view(len(key), self._kv_heads, -1).transpose(0, 1)  # KV heads x tokens x head
        value = value.view(len(value), self._kv_heads, -1).transpose(0, 1)
        if count == 1:  # it sees all keys: so the query heads of a KV head are like several tokens
            query = query.view(1, self._kv_heads, self._group, -1)
            return scaled_dot_product_attention(query, key[None], value[None]).reshape(1, width)
        query = query.view(count, self._kv_heads, self._group, -1).permute(1, 2, 0, 3)
        key, value = (x[:, None].expand(-1, self._group, -1, -1) for x in (key, value))
        attended = scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        return attended.permute(2, 0, 1, 3).reshape(count, width)

    def _mask(self, before: int, count: int) -> Tensor:
        """Returns what is added to the scores of a chunk: new tokens x all tokens."""
        mask = torch.full((count, before + count), -torch.inf, dtype=self._cache.dtype, device=self._cache.device)
        return mask.triu_(before + 1)


class BlockAttention:
    """The same with torch's kernel for CUDA, in one call: it reads the blocks of each sequence where they lie."""

    def __init__(self, config: BackboneConfig, cache: Cache, chunks: Chunks, repeatable: bool = False) -> None:
        self._cache = cache
        self._repeatable = repeatable
        self._head = config.head_size
        table, before, counts = chunks
        lengths = before + counts
        self._places = sent(places_of(table, cache.block, before, counts), cache.device)
        self._table, self._lengths = self._sent(table), self._sent(lengths)
        self._ends, self._key_ends = (self._sent(np.cumsum([0, *those.tolist()])) for those in (counts, lengths))
        self._longest, self._longest_key = int(counts.max()), int(lengths.max())

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # initialises CUDA's kernels

        grouped = key.shape[1] < query.shape[1]
        keys, values = (
            x.view(-1, self._cache.block, key.shape[1] // self._head, self._head)
            for x in _written(self._cache, layer, self._places, key, value)
        )
        # The last query of a sequence sees its last key, and each one before it one key less. A single one sees all.
        options: dict[str, Any] = {"window_size": (-1, 0)} if self._longest > 1 else {}
        if self._repeatable:
            options["num_splits"] = 1  # otherwise it divides the keys of each sequence by the length of the longest one
        attended = varlen_attn(
            query.view(len(query), -1, self._head), keys, values, self._ends, self._key_ends, self._longest, self._longest_key,
            enable_gqa=grouped, seqused_k=self._lengths, block_table=self._table, **options,
        )  # fmt: skip
        return cast(Tensor, attended).flatten(1)  # it returns a pair only with `return_aux`

    def _sent(self, numbers: Array) -> Tensor:
        return sent(numbers.astype(np.int32), self._cache.device)


def _written(cache: Cache, layer: int, at: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Writes new keys and values to their places. Returns those of the whole layer."""
    keys, values = cache.layer(layer)
    keys.index_copy_(0, at, key)
    values.index_copy_(0, at, value)
    return keys, values


class _Cached(ctypes.Structure):
    _fields_ = (
        *HOW, *pointer_fields("query", "keys", "values", "table", "lengths", "out"),
        *number_fields("query_stride", "stride", "tokens", "kv_heads", "group", "head", "most", "block"),
        ("scale", ctypes.c_float),
    )  # fmt: skip


def has_kernel(cache: Cache, head: int) -> bool:
    """Whether the compiled kernel takes heads of this size. It works in 32 bits, on CPUs of x86-64 with AVX2."""
    return cache.device.type == "cpu" and cache.dtype is torch.float32 and head % STEP == 0 and vectors() is not None


def attend_singles(query: Tensor, keys: Tensor, values: Tensor, table: Array, block: int, lengths: Array, head: int) -> Tensor:
    """Returns what one token of each sequence sees, by the compiled kernel: tokens x (heads * head). It sees `lengths` keys.

    `table`: a row for each token with the numbers of the blocks of its keys, which have so many places each; int32.
    """
    compiled = kernel()
    assert compiled is not None  # it fits
    query = query if query.stride(1) == 1 else query.contiguous()
    tokens, width = query.shape
    kv_heads, out = keys.shape[1] // head, query.new_empty(tokens, width)
    cached = _Cached(
        *compiled.how(torch.get_num_threads() if int(lengths.sum()) * width >= WORTH else 1),
        query.data_ptr(), keys.data_ptr(), values.data_ptr(), table.ctypes.data, lengths.ctypes.data, out.data_ptr(),
        query.stride(0), keys.stride(0), tokens, kv_heads, width // head // kv_heads, head, table.shape[1], block, head**-0.5,
    )  # fmt: skip
    compiled.library.hplm_attend_cached(ctypes.byref(cached))
    return out
