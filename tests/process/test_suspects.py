"""The end of an engine tells what was in its batches. Suspects then run alone, and the guilty are refused for a while."""

import os
import struct
import time

import pytest

from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.process.channel import Apart
from hplm.process.in_flight import LONGEST, InFlight, InFlightEntry, read
from hplm.process.suspects import (
    CLEAN_ANSWERS,
    REFUSED_SECONDS,
    REMEMBERED_SECONDS,
    SUSPECTED_SECONDS,
    Separation,
    Suspects,
)
from tests.support.wait import Clock

ENDS = {  # the tenants in batches at each end of the engine, and the second; who is guilty of the last one; who runs alone when
    "all of a batch are suspects": ([("abc", 0)], None, [(1, "abc")]),
    "who ends it alone is guilty, and clears the others": ([("abc", 0), ("a", 1)], "a", [(2, "a")]),
    "an end without a batch says nothing": ([("ab", 0), ("", 1)], None, [(1, "ab")]),
    "suspects of another end stay so": ([("ab", 0), ("cd", 1), ("c", 2)], "c", [(2, "abc")]),
    "a guilty one that is served again is guilty again": ([("ab", 0), ("a", 1), ("a", 3601)], "a", [(3601, "a")]),
    "a suspicion ends": ([("ab", 0)], None, [(SUSPECTED_SECONDS - 1, "ab"), (SUSPECTED_SECONDS, "")]),
    "and is forgotten": ([("a", 0), ("a", REMEMBERED_SECONDS)], None, [(REMEMBERED_SECONDS + SUSPECTED_SECONDS, "")]),
}


@pytest.mark.parametrize(("ends", "guilty", "alone"), ENDS.values(), ids=ENDS)
def test_who_is_guilty_and_who_runs_alone(ends, guilty, alone):
    suspects = Suspects()
    assert suspects.alone(0) == frozenset()
    found = [suspects.ended(set(tenants), now) for tenants, now in ends]
    assert found[-1] == guilty
    for now, tenants in alone:
        assert suspects.alone(now) == {*tenants}


def test_clean_answers_end_a_suspicion():
    suspects = Suspects()
    suspects.ended({"a", "b"}, 0)
    for _ in range(CLEAN_ANSWERS - 1):
        suspects.answered("a")
    assert suspects.alone(0) == {"a", "b"}
    suspects.answered("a")
    suspects.answered("d")  # of whom nobody has thought ill
    assert suspects.alone(0) == {"b"}


def test_who_waits_until_it_is_cleared_each_time_ends_the_engine_ever_more_seldom():
    suspects, now, ends, answers = Suspects(), 0.0, 0, 0
    while now < REMEMBERED_SECONDS:
        assert suspects.ended({"a", "b"}, now) is None
        ends += 1
        while "a" in suspects.alone(now):
            now += SUSPECTED_SECONDS
    assert ends <= 8  # not 144
    suspects.ended({"a", "b"}, now)
    while "a" in suspects.alone(now):
        suspects.answered("a")
        answers += 1
    assert answers >= CLEAN_ANSWERS << 7


def test_who_is_guilty_is_refused_for_a_while_and_each_time_for_twice_as_long():
    suspects, ends = Suspects(), [0.0]
    suspects.ended({"a", "b"}, 0)
    assert suspects.refused(0) == frozenset()
    while ends[-1] < REMEMBERED_SECONDS / 2:
        assert suspects.ended({"a"}, ends[-1]) == "a"
        until = ends[-1] + REFUSED_SECONDS * 2 ** (len(ends) - 1)
        assert suspects.refused(until - 1) == {"a"}
        assert suspects.refused(until) == frozenset() and suspects.alone(until) == {"a"}
        ends.append(until)
    assert len(ends) <= 8
    assert suspects.ended({"a"}, ends[-1] + 2 * REMEMBERED_SECONDS) is None, "it is still remembered"


def test_tenants_are_apart_until_their_time_is_over():
    clock, meter, guilty, none = Clock(time.time()), Meter(), 3, Apart(frozenset(), frozenset())
    separation = Separation(meter, clock)
    separation.ended([InFlightEntry(7, guilty, "acme")])
    assert separation.apart == Apart(frozenset({guilty}), frozenset())
    separation.ended([InFlightEntry(8, guilty, "acme")])
    assert separation.apart == Apart(frozenset({guilty}), frozenset({guilty}))
    assert meter.take()[1] == {(names.SUSPECTED_TENANTS, ()): 1, (names.QUARANTINED_TENANTS, ()): 1}
    for clock.set_by in (-90_000, 90_000):
        separation.look()
        assert separation.apart.refused == {guilty}, "a wall clock that is set releases it"
    clock.sleep(REFUSED_SECONDS)
    separation.look()
    assert separation.apart == Apart(frozenset({guilty}), frozenset())
    clock.sleep(REMEMBERED_SECONDS)
    separation.look()
    assert separation.apart == none


PLACE = struct.Struct("<qqq")


@pytest.fixture
def memory():
    descriptor = os.memfd_create("batches")
    yield descriptor
    os.close(descriptor)


def test_all_batches_that_have_not_left_are_read(memory):
    """`tests/server/test_supervisor.py` reads those of a killed process."""
    shown = InFlight(2, 3, memory)
    shown.enter("computed", [InFlightEntry(1, 1, "a").packed()])
    shown.enter("computing", [InFlightEntry(2, 2, "b").packed(), InFlightEntry(3, 2, "b").packed()])
    shown.leave("computed")
    shown.enter("staged", [InFlightEntry(4, 5, "c").packed()])
    assert sorted(read(memory)) == [InFlightEntry(2, 2, "b"), InFlightEntry(3, 2, "b"), InFlightEntry(4, 5, "c")]
    shown.compute("computing")
    shown.compute("computed")
    assert sorted(read(memory, staged=False)) == [InFlightEntry(2, 2, "b"), InFlightEntry(3, 2, "b")]


def test_the_longest_marks_have_room(memory):
    shown, longest = InFlight(2, 3, memory), InFlightEntry(2**63, 2**64 - 1, "x" * 64)
    assert len(longest.packed()) <= LONGEST
    for batch in range(2):
        shown.enter(batch, [longest.packed()] * 4)  # one more than was said
    assert list(read(memory)) == [longest] * 6


@pytest.mark.parametrize("damage", [(-16, 0), (8, 0), (1 << 40, 0), (408, -1), (408, 1 << 40), (408, 385)])
def test_damaged_memory_is_told_from_an_engine_that_had_nothing(memory, damage):
    InFlight(2, 3, memory)
    assert PLACE.unpack(os.pread(memory, PLACE.size, 408)) == (408, 0, 0)
    os.pwrite(memory, PLACE.pack(*damage, 0), 408)
    with pytest.raises(ValueError):
        list(read(memory))
