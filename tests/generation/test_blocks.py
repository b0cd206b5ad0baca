"""Blocks of the cache: none is lost, none is given twice, and a shared one is free when the last of its rooms is given back."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from hplm.errors import InvalidInput
from hplm.generation.blocks import Blocks
from hplm.generation.cache import BLOCK, CUDA_BLOCK, Cache, space_of
from hplm.generation.ranges import LEAST, Ranges
from hplm.generation.room import Room, places_of
from hplm.options import AUTO, CACHES, PAGED, SLOTTED
from tests.generation.small import CPU
from tests.support.message import mentioning

CUDA = torch.device("cuda")


@pytest.mark.parametrize(("tokens", "block"), [(16, 16), (100, 16), (1024, 16), (60, 1), (4100, 32)])
def test_no_block_is_lost_or_owned_twice_in_10000_random_steps(tokens, block):
    """Each block has as many owners as rooms have it, and is free if it has none. Only shared blocks have several."""
    chance = random.Random(tokens + block)
    blocks = Blocks(tokens, 512, block)
    rooms: list[Room] = []
    shared = refused = grown = 0
    for _ in range(10_000):
        turn = chance.random()
        if rooms and turn < 0.3:
            given = [rooms.pop() for _ in range(chance.randrange(1, 1 + min(3, len(rooms))))]
            freed = blocks.free + blocks.freed_by(given)
            for room in given:
                blocks.give_back(room)
            assert blocks.free == freed
            chance.shuffle(rooms)
        elif rooms and turn < 0.5:
            at = chance.randrange(len(rooms))
            before, wanted = rooms[at], chance.randrange(1, blocks.largest + 1)
            larger = blocks.grow(before, wanted)
            if larger is not None:
                grown += larger.size > before.size
                assert larger.size >= wanted and larger.starts[: len(before.starts)] == before.starts
                rooms[at] = larger
        elif rooms and turn < 0.7:
            other, alike = chance.choice(rooms), chance.randrange(0, blocks.largest + 1)
            own = blocks.share(other, alike)
            assert (own is None) == (alike < block)
            if own is not None:
                assert own.starts == other.starts[: alike // block]
                shared += 1
                rooms.append(own)
        else:
            wanted = chance.randrange(1, blocks.largest + 1)
            own = blocks.take(wanted)
            refused += own is None
            if own is not None:
                assert own.size == blocks.size_for(wanted) and not {*own.starts} & {s for room in rooms for s in room.starts}
                rooms.append(own)
        owners = Counter(start for room in rooms for start in room.starts)
        assert {start: count for start, count in blocks._rooms.items() if count} == owners
        assert sorted([*blocks._free, *owners]) == list(range(0, blocks.tokens, block))
        assert blocks.free == blocks.tokens - block * len(owners)
    assert refused and shared and (grown or blocks.tokens == block)
    for room in rooms:
        blocks.give_back(room)
    assert blocks.free == blocks.tokens and blocks.take(blocks.largest) is not None


def test_a_room_longer_than_a_sequence_or_the_cache_is_refused():
    blocks = Blocks(100, 4096, 16)
    assert blocks.largest == blocks.tokens == 96
    assert blocks.take(97) is None and Blocks(1000, 40, 16).take(49) is None


def test_a_refused_room_leaves_everything_as_it_was():
    cache = Cache(Blocks(64, 64, 16), 1, 1, CPU)
    own = cache.take(40)
    assert cache.take(40, own, 20) is None  # one block is shared, one is free, and two are needed
    assert cache.space.free == 16 and set(cache.space._rooms.values()) == {0, 1}


@pytest.mark.parametrize("kind", [SLOTTED, PAGED])
def test_what_is_done_to_a_copy_is_not_done_to_the_space(kind):
    space = space_of(kind, 512, 512, CPU)
    rooms = [space.take(tokens) for tokens in (30, 60, 100)]
    space.give_back(rooms[0])
    free, copied = space.free, space.copy()
    copied.give_back(rooms[1])
    taken = [copied.take(64), copied.take(32)]
    assert space.free == free == 512 - space.size_for(60) - space.size_for(100) and space.freed_by(rooms[1:]) == 512 - free
    space.give_back(rooms[1])
    assert [space.take(64), space.take(32)] == taken


@pytest.mark.parametrize("kind", [SLOTTED, PAGED])
@pytest.mark.parametrize("alike", [1, 31, 32, 33, 64, 70])
def test_a_room_that_is_like_another_has_its_first_tokens(kind, alike):
    cache = Cache(space_of(kind, 512, 512, CPU), 2, 3, CPU)
    other = cache.take(80)
    keys, values = cache.layer(1)
    at = places_of([other], np.array([0]), np.array([80]))
    keys[at], values[at] = torch.randn(80, 3), torch.randn(80, 3)
    wanted = keys[at][:alike].clone(), values[at][:alike].clone()
    own = cache.take(100, other, alike)
    cache.copy(other, own, alike)
    mine = places_of([own], np.array([0]), np.array([alike]))
    assert torch.equal(keys[mine], wanted[0]) and torch.equal(values[mine], wanted[1])
    same = len({*own.starts} & {*other.starts})
    assert same == (alike // BLOCK if kind == PAGED else 0)
    rest = places_of([own], np.array([same * own.piece]), np.array([own.size - same * own.piece]))
    assert not {*rest.tolist()} & {*places_of([other], np.array([0]), np.array([other.size])).tolist()}  # where it may write


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
        ("dense", 512, CPU, ["'dense'", *CACHES]),
        (SLOTTED, LEAST - 1, CPU, [LEAST - 1, LEAST]),
        (PAGED, BLOCK - 1, CPU, [BLOCK - 1, BLOCK]),
        (AUTO, CUDA_BLOCK - 1, CUDA, [CUDA_BLOCK - 1, CUDA_BLOCK]),
    ],
)
def test_a_cache_that_cannot_be_is_refused(kind, tokens, device, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        space_of(kind, tokens, 512, device)
