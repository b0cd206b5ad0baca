"""Ranges of the cache: nothing is lost, nothing has two owners, and what is free serves any size again."""

import random

import pytest

from hplm.generation.ranges import LEAST, Ranges
from hplm.generation.room import Room


def owned_once(ranges, owned):
    """Whether owned and free ranges cover all places, each once."""
    free = [(start, size) for size, starts in ranges._free.items() for start in starts]
    both = sorted([*free, *((*own.starts, own.size) for own in owned)])
    end = 0
    for start, size in both:
        if start != end:
            return False
        end += size
    return end == ranges.tokens


@pytest.mark.parametrize("tokens", [LEAST, 96, 1000, 4096, 4100])
def test_no_place_is_lost_or_owned_twice_in_10000_random_steps(tokens):
    chance = random.Random(tokens)
    ranges = Ranges(tokens, 512)
    owned = []
    grown = refused = 0
    for _ in range(10_000):
        if owned and chance.random() < 0.3:
            ranges.give_back(owned.pop(chance.randrange(len(owned))))
        elif owned and chance.random() < 0.4:
            at = chance.randrange(len(owned))
            wanted = min(owned[at].size + 1, ranges.largest)
            larger = ranges.grow(owned[at], wanted)
            if larger is not None and wanted > owned[at].size:
                grown += 1
                assert larger.size == ranges.size_for(wanted)
                owned[at] = larger
        else:
            wanted = chance.randrange(1, ranges.largest + 1)
            own = ranges.take(wanted)
            refused += own is None
            if own is not None:
                assert own.size >= wanted
                owned.append(own)
        assert owned_once(ranges, owned)
        assert ranges.free + sum(own.size for own in owned) == ranges.tokens
    assert refused and (grown or tokens == LEAST)
    assert ranges.freed_by(owned) == ranges.tokens - ranges.free
    for own in owned:
        ranges.give_back(own)
    assert ranges.take(ranges.largest) is not None


@pytest.mark.parametrize("tokens", [LEAST, 96, 224, 1024])
def test_a_sequence_that_is_alone_grows_to_the_largest_range(tokens):
    ranges = Ranges(tokens, 10_000)
    own, others = None, []
    while (other := ranges.take(1)) is not None:
        others.append(other)
    own = others.pop()  # the last place of all
    for other in others:
        ranges.give_back(other)
    while own.size < ranges.largest:
        before = own.size
        own = ranges.grow(own, own.size + 1)
        assert own is not None and own.size == 2 * before
    assert owned_once(ranges, [own])


def test_a_range_grows_where_it_is_if_its_neighbour_is_free():
    ranges = Ranges(256, 256)
    first, second, third = (ranges.take(32) for _ in range(3))
    ranges.give_back(second)
    grown = ranges.grow(first, 33)
    assert grown == Room((0,), 64)
    assert ranges.grow(grown, 65).starts == (128,)  # the third is in the way
    assert third.starts == (64,)


def test_a_sequence_longer_than_the_cache_gets_no_range():
    ranges = Ranges(100, 4096)
    assert ranges.largest == 64 and ranges.tokens == 96
    assert ranges.take(65) is None
