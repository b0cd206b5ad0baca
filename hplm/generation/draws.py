"""One uniform number for each token, from a seed and the token's place. So company and timing never change a draw."""

from __future__ import annotations

import numpy as np

from hplm.arrays import Array

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
BITS = 24  # as many as a float of 32 bits holds exactly


def mixed(numbers: Array) -> Array:
    """Returns 64 random bits for each number of 64 bits: the function `splitmix64` of Steele, Lea and Flood (2014)."""
    with np.errstate(over="ignore"):
        bits = numbers + GOLDEN
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))


def seed_of(seed: int, choice: int) -> int:
    """Returns the seed of one answer of a request. The first answer has the request's own."""
    if not choice:
        return seed % 2**64
    own = np.array([seed % 2**64], dtype=np.uint64)
    return int(mixed(own ^ mixed(np.array([choice], dtype=np.uint64)))[0])


def uniform(seeds: Array, places: Array) -> Array:
    """Returns a number from 0 to below 1 for each pair of a seed and a place, float32."""
    bits = mixed(seeds.astype(np.uint64) ^ mixed(places.astype(np.uint64)))
    return (bits >> np.uint64(64 - BITS)).astype(np.float32) * np.float32(2.0**-BITS)
