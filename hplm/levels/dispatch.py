"""The dispatcher: which answers are not sure enough, so that the next level answers too (Tabi, Eq. 4)."""

from __future__ import annotations

import zlib

import numpy as np

from hplm.arrays import Array

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B1  # an odd number of 32 bits: different versions and steps stay different when they are multiplied by it
STEEPEST = 700.0  # exp of more is near the largest float


def reroutes(confidences: Array, cutoffs: Array | float, slopes: Array | float, draws: Array | float) -> Array:
    """Returns which texts go on to the next level.

    A confidence up to the cutoff always does, so an unknown one (-1) does, and with a cutoff of 1 all do. A higher one does if
    the draw is below the probability of Eq. 4, which falls from its value at the cutoff to that at 1.
    """
    return (confidences <= cutoffs) | (draws < probabilities(confidences, cutoffs, slopes))


def probabilities(confidences: Array, cutoffs: Array | float, slopes: Array | float) -> Array:
    """Returns the probability of Eq. 4 that a text goes on to the next level."""
    cut = np.asarray(cutoffs, dtype=np.float64)
    room = np.where(cut < 1, 1 - cut, 1.0)  # with a cutoff of 1 there is nothing above it
    norm = (confidences - cut) / room - 0.5
    above = 1 / (1 + np.exp(np.clip(slopes * norm, -STEEPEST, STEEPEST)))
    return np.where((confidences > cut) & (cut < 1), above, 1.0)


def draw(rows: Array, version: int, step: int = 0) -> float:
    """Returns a number from 0 to below 1 that looks random, and is the same for the same text, tenant version and step.

    `rows`: the addresses of the text's rows, in one piece of memory. Each step of a plan has a draw of its own: with a common
    one, all texts that went on by chance would do so again.
    """
    bits = zlib.crc32(rows.data) ^ (version * GOLDEN + step * 0x85EBCA6B) & MASK
    bits = ((bits ^ bits >> 16) * 0x85EBCA6B) & MASK  # the finaliser of MurmurHash3: CRC alone mixes poorly
    bits = ((bits ^ bits >> 13) * 0xC2B2AE35) & MASK
    return (bits ^ bits >> 16) / (MASK + 1)
