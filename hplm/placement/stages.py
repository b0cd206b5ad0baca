"""Cuts: which layers of a backbone each stage of a group computes (AlpaServe 4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from hplm.placement.profile import BackboneProfile, Shape, Terms

Cut = tuple[tuple[int, int], ...]  # of each stage the first and the last layer, both included


def best_cut(
    profile: BackboneProfile, hop: Terms, intra: int, stages: int, shape: Shape, room: Sequence[int] | None = None
) -> Cut:
    """Returns the cut whose slowest stage is the fastest: F(s, k) of AlpaServe 4.1; an empty one if none has enough room.

    `room`: the bytes that each stage has.
    """
    layers = profile.layers
    ends = [0.0, *accumulate(profile.terms(intra, layer, layer).ns(*shape) for layer in range(layers))]
    core_ns, hop_ns = profile.core.shared_by(intra).ns(*shape), hop.ns(*shape)
    no_cut: list[tuple[float, Cut]] = [(math.inf, ())]
    best = [(0.0, ()), *no_cut * layers]  # by number of first layers: the slowest of the stages so far, and their cut
    for stage in range(stages):
        before, best = best, no_cut * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for begin in range(stage, end):
                slowest = max(before[begin][0], ends[end] - ends[begin] + (hop_ns if begin else core_ns))
                fits = room is None or profile.stage_bytes(begin, end - 1) <= room[stage]
                if fits and slowest < best[end][0]:
                    best[end] = slowest, (*before[begin][1], (begin, end - 1))
    return best[layers][1]
