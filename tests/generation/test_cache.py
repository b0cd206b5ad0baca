"""The cache: each sequence keeps what was written to it, whatever is taken, grown, shared and given back beside it."""

import random
from collections import Counter
from itertools import count

import numpy as np
import pytest
import torch

from hplm.errors import InvalidInput
from hplm.generation.cache import BLOCK, CUDA_BLOCK, Blocks, Cache, least_tokens, places_of, table_of
from tests.generation.world import CPU, places
from tests.support.message import mentioning

LONGEST = 512


class Sequences:
    """The blocks of sequences in a cache, and the numbers that were written to each."""

    def __init__(self, tokens, block):
        self.chance, self.numbers = random.Random(tokens + block), count(1)
        self.cache = Cache(tokens, LONGEST, 1, 1, CPU, torch.float64, block)
        self.memory = self.cache.layer(0)[0][:, 0].numpy()
        self.held: list[tuple[Blocks, np.ndarray]] = []
        self.happened = Counter()

    def keep(self, own, first=()):
        """Fills blocks whose first numbers are there already."""
        numbers = np.array([*first, *(next(self.numbers) for _ in range(self.cache.size_of(own) - len(first)))], np.float64)
        self.memory[places(self.cache, own, len(first))] = numbers[len(first) :]
        self.held.append((own, numbers))

    def has_room(self, tokens, has=0):
        size = self.cache.size_for(tokens)
        return size <= self.cache.largest and self.cache.free >= size - has

    def some(self):
        return self.chance.randrange(1, self.cache.largest + 2)

    def take(self):
        tokens = self.some()
        can, own = self.has_room(tokens), self.cache.take(tokens)
        assert can == (own is not None)
        self.happened["took" if can else "refused"] += 1
        if own is not None:
            assert self.cache.size_of(own) == self.cache.size_for(tokens)
            self.keep(own)

    def take_alike(self):
        other, numbers = self.chance.choice(self.held)
        alike = self.chance.randrange(1, self.cache.size_of(other) + 1)
        tokens = alike + self.chance.randrange(1, 40)
        shared = alike // self.cache.block
        can, own = self.has_room(tokens, shared * self.cache.block), self.cache.take(tokens, other, alike)
        assert can == (own is not None)
        self.happened["alike" if can else "none alike"] += 1
        if own is not None:
            self.cache.copy(other, own, alike)
            assert {*own} & {*other} == {*other[:shared]}
            self.keep(own, numbers[:alike])

    def grow(self):
        own, numbers = self.held.pop(self.chance.randrange(len(self.held)))
        size = self.cache.size_of(own)
        tokens = self.chance.randrange(size, self.cache.largest + 2)
        can, grown = self.has_room(tokens, size), self.cache.grow(own, tokens)
        assert can == (grown is not None)
        self.happened["grew" if can else "did not grow"] += 1
        if grown is None:
            self.held.append((own, numbers))
        else:
            self.keep(grown, numbers)

    def give_back(self):
        self.chance.shuffle(self.held)
        given = [self.held.pop()[0] for _ in range(self.chance.randrange(1, 1 + min(3, len(self.held))))]
        freed = self.cache.free + self.cache.freed_by(given)
        for own in given:
            self.cache.give_back(own)
        assert self.cache.free == freed

    def check(self):
        for own, numbers in self.held:
            assert np.array_equal(self.memory[places(self.cache, own)], numbers)
        assert self.cache.free == self.cache.tokens - self.cache.size_of({block for own, _ in self.held for block in own})


@pytest.mark.parametrize(("tokens", "block"), [(16, 16), (60, 1), (100, 16), (1024, 16), (4100, 32)])
def test_each_sequence_keeps_its_tokens_and_nothing_is_lost(tokens, block):
    """A refusal means that there was no room, and it changes nothing."""
    sequences = Sequences(tokens, block)
    cache, happened = sequences.cache, sequences.happened
    for _ in range(600):
        more = [sequences.take_alike, sequences.grow, sequences.give_back] if sequences.held else []
        sequences.chance.choice([sequences.take, *more])()
        sequences.check()
    small = cache.tokens == cache.block  # no second block
    assert small or all(happened[one] for one in ("took", "refused", "alike", "none alike", "grew", "did not grow"))
    for own, _ in sequences.held:
        cache.give_back(own)
    assert cache.free == cache.tokens and cache.take(cache.largest) is not None


def test_places_of_several_sequences_lie_end_to_end():
    found = places_of(table_of([(2, 0), (4,), (1, 3)]), 32, np.array([30, 5, 0]), np.array([4, 2, 33]))
    assert found.tolist() == [94, 95, 0, 1, 133, 134, *range(32, 64), 96]


@pytest.mark.parametrize(("device", "block"), [("cpu", BLOCK), ("cuda", CUDA_BLOCK)])
def test_a_cache_has_a_block_of_its_device_at_least(device, block, monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr("torch.zeros", lambda *shape, device, dtype: zeros(*shape, dtype=dtype))
    device = torch.device(device)
    assert Cache(block, LONGEST, 1, 1, device).block == block
    with pytest.raises(InvalidInput, match=mentioning(block - 1, block)):
        Cache(block - 1, LONGEST, 1, 1, device)
    assert least_tokens(LONGEST - 1) == least_tokens(LONGEST) == 512
