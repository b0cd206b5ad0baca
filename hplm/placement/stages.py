"""Cuts: which layers of a backbone each stage of a group computes (AlpaServe 4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.placement.profile import BackboneProfile, Shape, Terms

Cut = tuple[tuple[int, int], ...]  # of each stage the first and the last layer, both included


def equal_cut(layers: int, stages: int) -> Cut:
    """Returns stages of equal numbers of layers, as far as these divide."""
    if not 1 <= stages <= layers:
        raise InvalidInput(f"{layers} layers do not make {stages} stages: give 1 to {layers}")
    ends = [layers * (stage + 1) // stages for stage in range(stages)]
    return tuple(zip([0, *ends], [end - 1 for end in ends], strict=False))


def stage_bytes(profile: BackboneProfile, first: int, last: int) -> int:
    """Returns the bytes of a stage with these layers: their weights, and their part of all slots."""
    slots = -(-profile.slots * profile.slot_bytes * (last - first + 1) // profile.layers)
    return sum(profile.layer_bytes[first : last + 1]) + slots + (profile.entry_bytes if first == 0 else 0)


def stage_times(profile: BackboneProfile, hop: Terms, intra: int, cut: Cut, shape: Shape) -> Array:
    """Returns the nanoseconds of each stage for a batch of this shape."""
    return np.array([terms.ns(*shape) for terms in profile.stages(hop, intra, cut)])


def best_cut(
    profile: BackboneProfile, hop: Terms, intra: int, stages: int, shape: Shape, room: Sequence[int] | None = None
) -> Cut:
    """Returns the cut whose slowest stage is the fastest: F(s, k) of AlpaServe 4.1. `room`: the bytes that each stage has.

    Raises InvalidInput if no cut has enough room.
    """
    layers = profile.layers
    equal_cut(layers, stages)  # raises if there are fewer layers than stages
    ends = [0.0, *accumulate(profile.terms(intra, layer, layer).ns(*shape) for layer in range(layers))]
    core_ns, hop_ns = profile.core.shared_by(intra).ns(*shape), hop.ns(*shape)
    no_cut: list[tuple[float, Cut]] = [(math.inf, ())]
    best = [(0.0, ()), *no_cut * layers]  # by number of first layers: the slowest of the stages so far, and their cut
    for stage in range(stages):
        before, best = best, no_cut * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for begin in range(stage, end):
                slowest = max(before[begin][0], ends[end] - ends[begin] + (hop_ns if begin else core_ns))
                fits = room is None or stage_bytes(profile, begin, end - 1) <= room[stage]
                if fits and slowest < best[end][0]:
                    best[end] = slowest, (*before[begin][1], (begin, end - 1))
    if not (cut := best[layers][1]):
        needed = stage_bytes(profile, 0, layers - 1)
        raise InvalidInput(f"no cut of {layers} layers with {needed:,} bytes fits {stages} stages: give more memory")
    return cut
