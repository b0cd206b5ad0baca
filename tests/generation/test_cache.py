"""The cache: each room keeps what was written to it, whatever is taken, grown, shared and given back beside it."""

import random
from collections import Counter
from itertools import count

import numpy as np
import pytest
import torch

from hplm.errors import InvalidInput
from hplm.generation.cache import BLOCK, CUDA_BLOCK, LEAST, Blocks, Cache, Ranges, Room, places_of, space_of
from hplm.options import AUTO, PAGED, SLOTTED
from tests.generation import world
from tests.generation.world import CPU, all_of
from tests.support.message import mentioning

CUDA = torch.device("cuda")
LONGEST = 512
SIZES = [(SLOTTED, LEAST, 0), (SLOTTED, 96, 0), (SLOTTED, 1000, 0), (SLOTTED, 4100, 0)]
SIZES += [(PAGED, 16, 16), (PAGED, 60, 1), (PAGED, 100, 16), (PAGED, 1024, 16), (PAGED, 4100, 32)]


class Rooms:
    """Rooms of a cache, and the numbers that were written to each."""

    def __init__(self, kind, tokens, block):
        self.chance, self.numbers = random.Random(tokens + block), count(1)
        self.cache = Cache(world.space_of(kind, tokens, LONGEST, block), 1, 1, CPU, torch.float64)
        self.space, self.memory = self.cache.space, self.cache.layer(0)[0][:, 0].numpy()
        self.held: list[tuple[Room, np.ndarray]] = []
        self.happened = Counter()

    def keep(self, own, first=()):
        """Fills a room whose first numbers are there already."""
        numbers = np.array([*first, *(next(self.numbers) for _ in range(own.size - len(first)))], dtype=np.float64)
        self.memory[all_of(own)[len(first) :]] = numbers[len(first) :]
        self.held.append((own, numbers))

    def has_room(self, tokens, beside=(), shared=0):
        """Whether so many tokens have room if what is `beside` is free. A range begins at a multiple of its size."""
        size, owned = self.space.size_for(tokens), np.zeros(self.space.tokens, dtype=bool)
        for own, _ in self.held:
            owned[all_of(own)] |= own not in beside
        if self.space.block:
            return size <= self.space.largest and self.space.free >= size - shared
        return size <= self.space.largest and any(
            not owned[at : at + size].any() for at in range(0, self.space.tokens - size + 1, size)
        )

    def some(self):
        return self.chance.randrange(1, self.space.largest + 2)

    def take(self):
        tokens = self.some()
        can, own = self.has_room(tokens), self.cache.take(tokens)
        assert can == (own is not None)
        self.happened["took" if can else "refused"] += 1
        if own is not None:
            assert own.size == self.space.size_for(tokens)
            self.keep(own)

    def take_alike(self):
        other, numbers = self.chance.choice(self.held)
        alike = self.chance.randrange(1, other.size + 1)
        tokens = alike + self.chance.randrange(1, 40)
        shared = alike // self.space.block * self.space.block if self.space.block else 0
        can, own = self.has_room(tokens, shared=shared), self.cache.take(tokens, other, alike)
        assert can == (own is not None)
        self.happened["alike" if can else "none alike"] += 1
        if own is not None:
            self.cache.copy(other, own, alike)
            assert len({*all_of(own)} & {*all_of(other)}) == shared
            self.keep(own, numbers[:alike])

    def grow(self):
        own, numbers = self.held.pop(self.chance.randrange(len(self.held)))
        self.held.append((own, numbers))
        tokens = self.chance.randrange(own.size, self.space.largest + 2)
        can = self.has_room(tokens, [own], own.size) or self.has_room(tokens)
        grown = self.cache.grow(own, tokens, own.size)
        assert can == (grown is not None)
        self.happened["grew" if can else "did not grow"] += 1
        if grown is not None:
            self.held.pop()
            self.keep(grown, numbers)

    def give_back(self):
        self.chance.shuffle(self.held)
        given = [self.held.pop()[0] for _ in range(self.chance.randrange(1, 1 + min(3, len(self.held))))]
        tried, freed = self.space.copy(), self.space.free + self.space.freed_by(given)
        for room in given:
            tried.give_back(room)
        tried.take(1)  # which is not taken from the space
        for room in given:
            self.cache.give_back(room)
        assert self.space.free == freed

    def check(self):
        for own, numbers in self.held:
            assert np.array_equal(self.memory[all_of(own)], numbers)
        assert self.space.free == self.space.tokens - len({place for own, _ in self.held for place in all_of(own)})


@pytest.mark.parametrize(("kind", "tokens", "block"), SIZES)
def test_each_room_keeps_its_tokens_and_nothing_is_lost(kind, tokens, block):
    """A refusal means that there was no room, and it changes nothing."""
    rooms = Rooms(kind, tokens, block)
    for _ in range(600):
        rules = [rooms.take, *([rooms.take_alike, rooms.grow, rooms.give_back] if rooms.held else [])]
        rooms.chance.choice(rules)()
        rooms.check()
    small = rooms.space.tokens == rooms.space.size_for(1)  # no second room
    assert small or all(rooms.happened[one] for one in ("took", "refused", "alike", "none alike", "grew", "did not grow"))
    for own, _ in rooms.held:
        rooms.cache.give_back(own)
    assert rooms.space.free == rooms.space.tokens and rooms.cache.take(rooms.space.largest) is not None


def test_a_range_grows_where_it_is_if_its_neighbour_is_free():
    ranges = Ranges(256, 256)
    first, second, third = (ranges.take(32) for _ in range(3))
    ranges.give_back(second)
    grown = ranges.grow(first, 33)
    assert grown == Room((0,), 64)
    assert ranges.grow(grown, 65).starts == (128,)  # the third is in the way
    assert third.starts == (64,)


def test_places_of_several_rooms_lie_end_to_end():
    rooms = [Room((64, 0), 32), Room((128,), 64), Room((32, 96), 32)]
    found = places_of(rooms, np.array([30, 5, 0]), np.array([4, 2, 33]))
    assert found.tolist() == [94, 95, 0, 1, 133, 134, *range(32, 64), 96]
    assert [rooms[0].place(token) for token in range(30, 34)] == [94, 95, 0, 1]


def test_the_kind_of_the_cache_follows_the_device():
    assert isinstance(space_of(AUTO, 1024, 1024, CPU), Ranges)
    on_cuda = space_of(AUTO, 1024, 1024, CUDA)
    assert isinstance(on_cuda, Blocks) and on_cuda.block == CUDA_BLOCK
    assert space_of(PAGED, 1024, 1024, CPU).block == BLOCK
    assert isinstance(space_of(SLOTTED, 1024, 1024, CUDA), Ranges)


@pytest.mark.parametrize(
    ("kind", "tokens", "device", "named"),
    [
        (SLOTTED, LEAST - 1, CPU, [LEAST - 1, LEAST]),
        (PAGED, BLOCK - 1, CPU, [BLOCK - 1, BLOCK]),
        (AUTO, CUDA_BLOCK - 1, CUDA, [CUDA_BLOCK - 1, CUDA_BLOCK]),
    ],
)
def test_a_cache_that_cannot_be_is_refused(kind, tokens, device, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        space_of(kind, tokens, 512, device)
