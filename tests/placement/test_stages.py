"""Cuts: the dynamic programme against all cuts there are, and against equal ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import InvalidInput
from hplm.placement.profile import BackboneProfile, Shape, Terms
from hplm.placement.stages import Cut, best_cut, equal_cut, stage_bytes, stage_times
from tests.placement.problems import MB, backbone_profile
from tests.support.message import refusing

HOP = Terms(2e5, 5.0)
SHAPE = Shape(100.0, 2000.0, 5.0)


def cuts(layers: int, stages: int) -> Iterator[Cut]:
    for ends in combinations(range(1, layers), stages - 1):
        yield tuple((begin, end - 1) for begin, end in zip((0, *ends), (*ends, layers), strict=True))


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=8), st.data())
def test_the_best_cut_is_as_fast_as_the_best_of_all(batch_ns, data):
    profile = backbone_profile(batch_ns)
    stages = data.draw(st.integers(1, len(batch_ns)))
    room = data.draw(st.none() | st.lists(st.integers(0, 100).map(lambda mb: mb * MB), min_size=stages, max_size=stages))
    fitting = [
        cut
        for cut in cuts(len(batch_ns), stages)
        if room is None or all(stage_bytes(profile, *own) <= bytes_ for own, bytes_ in zip(cut, room, strict=True))
    ]
    if not fitting:
        with refusing(InvalidInput, "bytes"):
            best_cut(profile, HOP, 1, stages, SHAPE, room)
        return
    found = best_cut(profile, HOP, 1, stages, SHAPE, room)
    assert found in fitting
    fastest = min(slowest(profile, cut) for cut in fitting)
    assert slowest(profile, found) == pytest.approx(fastest)


def slowest(profile: BackboneProfile, cut: Cut) -> float:
    return max(terms.ns(*SHAPE) for terms in profile.stages(HOP, 1, cut))  # what both simulators take


def test_the_first_stage_also_does_what_is_outside_of_the_layers():
    """4 layers of 2 ms, a hop of 0.1 ms and 4 ms outside of the layers: 8.0 and 4.1 ms by 2 + 2, 6.0 and 6.1 by 1 + 3."""
    profile, hop = backbone_profile([0] * 4, times={1: (Terms(2e6),) * 4}, core=Terms(4e6)), Terms(1e5)
    assert stage_times(profile, hop, 1, equal_cut(4, 2), SHAPE).tolist() == [8e6, 4.1e6]
    best = best_cut(profile, hop, 1, 2, SHAPE)
    assert best == ((0, 0), (1, 3))
    assert stage_times(profile, hop, 1, best, SHAPE).tolist() == [6e6, 6.1e6]


def test_equal_cuts_have_all_layers_once():
    assert equal_cut(6, 4) == ((0, 0), (1, 2), (3, 3), (4, 5))
    assert equal_cut(3, 1) == ((0, 2),)
    with refusing(InvalidInput, "3 layers do not make 4"):
        equal_cut(3, 4)
