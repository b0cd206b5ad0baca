"""Where cached keys lie, and attention over them: that over whole sequences, by torch and by the compiled kernel."""

from dataclasses import replace
from itertools import product
from mmap import PAGESIZE as PAGE
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from hplm.errors import InvalidInput
from hplm.generation.attention import (
    CUDA_DTYPES,
    BlockAttention,
    CachedAttention,
    Chunks,
    attend_singles,
    cuda_options,
    reads_blocks,
)
from hplm.generation.cache import BLOCK, CUDA_BLOCK, Cache, least_tokens, places_of, table_of
from testing.toy import CHAT
from tests.generation.world import places
from tests.support.device import needs_cuda
from tests.support.message import mentioning
from tests.support.needed import needs_kernel

CPU = torch.device("cpu")
LAYER = 1


@pytest.fixture
def blocks_on_cuda():
    if "block_table" not in cuda_options():
        pytest.skip(f"torch {torch.__version__} has no attention over blocks on CUDA")


def config_of(heads, kv_heads, head):
    return replace(CHAT, hidden=heads * head, heads=heads, kv_heads=kv_heads, head=head)


def filled(config, tokens, seed):
    """Returns a cache of random numbers, with NaN where nobody may read."""
    cache = Cache(tokens, tokens, 2, config.key_width, CPU)
    for number in range(2):
        for part in cache.layer(number):
            part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(seed + number)))
    return cache


def chunks_of(*parts):
    """Returns chunks, each of its blocks, the tokens before it and its own."""
    blocks, before, counts = zip(*parts, strict=True)
    return Chunks(table_of(blocks), np.array(before), np.array(counts))


def expected(config, cache, blocks, before, query):
    """Returns the attention of one chunk, token by token and head by head."""
    keys, values = cache.layer(LAYER)
    head, group = config.head_size, config.heads * config.head_size // config.key_width
    out = torch.empty_like(query)
    for token in range(len(query)):
        seen = places(cache, blocks, 0, before + token + 1)
        for h in range(config.heads):
            own, its = slice(h * head, (h + 1) * head), slice(h // group * head, (h // group + 1) * head)
            three = (x[None] for x in (query[token : token + 1, own], keys[seen][:, its], values[seen][:, its]))
            out[token, own] = scaled_dot_product_attention(*three)[0, 0]
    return out


def random_chunks(chance, cache):
    """Returns chunks of up to 40 tokens behind up to 300 others, single tokens first, and which places of a cache they see."""
    sizes = [1] * int(chance.integers(0, 5)) + chance.integers(2, 40, int(chance.integers(0, 3))).tolist() or [1]
    blocks = iter(chance.permutation(cache.tokens // cache.block).tolist())
    chunks, read = [], torch.zeros(cache.tokens, dtype=torch.bool)
    for count in sizes:
        before = int(chance.integers(0, 300)) if chance.random() < 0.8 else 0
        whole = before + count
        own = tuple(next(blocks) for _ in range(-(-whole // cache.block)))
        chunks.append((own, before, count))
        read[places(cache, own, 0, whole)] = True
    return chunks, read


# The compiled kernel takes heads of a multiple of 16 numbers.
@pytest.mark.parametrize("head", [12, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (7, 1)])
def test_chunks_see_their_own_sequence_up_to_themselves(heads, kv_heads, head):
    config = config_of(heads, kv_heads, head)
    chance = np.random.default_rng(heads)
    for trial in range(5):
        cache = filled(config, 4096, trial)
        chunks, read = random_chunks(chance, cache)
        sizes = [count for _, _, count in chunks]
        for number in range(2):
            for part in cache.layer(number):
                part[~read] = torch.nan
        projected = torch.randn(sum(sizes), config.query_width + 2 * config.key_width) * 2
        query, key, value = projected.split([config.query_width, config.key_width, config.key_width], 1)  # as `Layer` does
        found = CachedAttention(config, cache, chunks_of(*chunks))(LAYER, query, key, value)
        wanted = [expected(config, cache, *of[:2], own) for of, own in zip(chunks, query.split(sizes), strict=True)]
        assert torch.allclose(found, torch.cat(wanted), atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("singles", [True, False])
def test_a_kernel_with_block_tables_gets_the_blocks_of_each_sequence(monkeypatch, heads, kv_heads, singles):
    """Stands in for the CUDA kernel: it reads keys through the table, and aligns queries with the last keys."""
    config = config_of(heads, kv_heads, 16)
    chunks = [((1, 3), 39, 1), ((0,), 4, 1)]
    if not singles:
        chunks += [((2, 6, 4), 60, 9), ((5,), 0, 5)]
    cache = Cache(256, 256, 2, config.key_width, CPU)
    for part in cache.layer(LAYER):
        part.copy_(torch.randn(part.shape))

    def varlen(
        query, key, value, ends, key_ends, longest, longest_key, *, enable_gqa, seqused_k, block_table,
        window_size=(-1, -1), num_splits=None,
    ):  # fmt: skip
        assert num_splits == (1 if singles else None)
        assert {x.dtype for x in (ends, key_ends, seqused_k, block_table)} == {torch.int32}
        assert key.shape == value.shape == (8, 32, kv_heads, 16) and enable_gqa == (kv_heads < heads)
        lengths = seqused_k.tolist()
        assert key_ends.diff().tolist() == lengths and longest_key == max(lengths)
        counts = ends.diff().tolist()
        assert longest == max(counts) and (window_size == (-1, 0) or longest == 1)
        parts = []
        for own, count, length, table in zip(query.split(counts), counts, lengths, block_table.long(), strict=True):
            its = [x[table].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (key, value)]
            mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            attended = scaled_dot_product_attention(own.transpose(0, 1)[None], *its, mask, enable_gqa=enable_gqa)
            parts.append(attended[0].transpose(0, 1))
        return torch.cat(parts)

    step = chunks_of(*chunks)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    projected = torch.randn(step.counts.sum(), config.query_width + 2 * config.key_width)
    query, key, value = projected.split([config.query_width, config.key_width, config.key_width], 1)
    found = BlockAttention(config, cache, step, repeatable=singles)(LAYER, query, key, value)
    assert torch.allclose(found, CachedAttention(config, cache, step)(LAYER, query, key, value), atol=1e-5)


def test_blocks_on_cuda_in_16_bits_are_read_where_they_lie(blocks_on_cuda):
    cases = product((64, 12), (torch.bfloat16, torch.float32), (CUDA_BLOCK, BLOCK))
    with FakeTensorMode():  # there need be no GPU
        caches = [(case, Cache(512, 512, 1, 1, torch.device("cuda"), *case[1:])) for case in cases]
    found = [case for case, cache in caches if reads_blocks(config_of(4, 2, case[0]), cache)]
    assert found == [(64, torch.bfloat16, CUDA_BLOCK)]


@needs_kernel()
def test_a_token_alone_has_the_same_numbers_as_in_company():
    config = config_of(9, 3, 64)
    cache = filled(config, 4096, 0)
    query = torch.randn(20, config.query_width)
    keys, values = cache.layer(0)
    table, lengths = np.random.default_rng(0).permutation(120).reshape(20, 6).astype(np.int32), np.arange(20) * 9 + 1
    whole = attend_singles(query, keys, values, table, BLOCK, lengths, 64)
    for i in range(20):
        alone = attend_singles(query[i : i + 1], keys, values, table[i : i + 1], BLOCK, lengths[i : i + 1], 64)
        assert torch.equal(alone[0], whole[i])


@needs_kernel()
@pytest.mark.parametrize("block", [300, 1000])
def test_scores_far_apart_do_not_overflow(block):
    """Also in a block with more keys than the kernel sees at once."""
    keys = torch.randn(300, 16) * 100
    values, query = torch.randn(300, 16), torch.randn(1, 16) * 100
    found = attend_singles(query, keys, values, np.zeros((1, 1), dtype=np.int32), block, np.array([300]), 16)
    assert torch.allclose(found, scaled_dot_product_attention(query[None], keys[None], values[None])[0], atol=1e-4)


@needs_cuda
@pytest.mark.parametrize(("heads", "kv_heads", "head"), [(9, 3, 64), (4, 4, 16), (7, 1, 128)])
@pytest.mark.parametrize("repeatable", [False, True])
def test_torchs_kernel_for_cuda_attends_as_the_gathered_keys_do(heads, kv_heads, head, repeatable, blocks_on_cuda):
    config, chance, cuda = config_of(heads, kv_heads, head), np.random.default_rng(heads), torch.device("cuda")
    for trial in range(5):
        caches = [Cache(16 * CUDA_BLOCK, 4 * CUDA_BLOCK, 2, config.key_width, cuda, dtype) for dtype in CUDA_DTYPES[:1] * 2]
        chunks, _ = random_chunks(chance, caches[0])
        sizes = sum(count for _, _, count in chunks)
        rows = torch.randn(sizes, config.query_width + 2 * config.key_width, device=cuda, dtype=CUDA_DTYPES[0])
        given, found = rows.split([config.query_width, config.key_width, config.key_width], 1), []
        memory = torch.randn(2, caches[0].tokens, config.key_width, device=cuda)
        for cache, kind in zip(caches, (BlockAttention, CachedAttention), strict=True):
            for part, numbers in zip(cache.layer(LAYER), memory, strict=True):
                part.copy_(numbers)
            options = [repeatable] if kind is BlockAttention else []
            found.append(kind(config, cache, chunks_of(*chunks), *options)(LAYER, *given).float())
        assert torch.allclose(*found, atol=0.02), (trial, (found[0] - found[1]).abs().max())


def test_places_of_several_sequences_lie_end_to_end():
    found = places_of(table_of([(2, 0), (4,), (1, 3)]), 32, np.array([30, 5, 0]), np.array([4, 2, 33]))
    assert found.tolist() == [94, 95, 0, 1, 133, 134, *range(32, 64), 96]


@pytest.mark.parametrize(("device", "block"), [("cpu", BLOCK), ("cuda", CUDA_BLOCK)])
def test_a_cache_has_a_block_of_its_device_at_least(device, block):
    device = torch.device(device)
    with FakeTensorMode(allow_non_fake_inputs=True):  # there need be no GPU
        assert Cache(block, 512, 1, 1, device).block == block
        assert Cache(2 * 512, 512, 1, 1, device).take(512 + 1) is None, "no sequence is so long"
    with pytest.raises(InvalidInput, match=mentioning(block - 1, block)):
        Cache(block - 1, 512, 1, 1, device)
    assert least_tokens(512 - 1) == least_tokens(512) == 512


def test_memory_of_a_cache_is_taken_as_it_is_used():
    def resident():
        return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * PAGE

    before, size = resident(), 1 << 28
    cache = Cache(size // (2 * 64 * 4), 64, 1, 64, CPU)
    assert resident() - before < size // 4
    assert not cache.layer(0)[1].any()
