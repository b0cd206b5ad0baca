"""The end of an engine tells what was in its batches. Suspects then run alone, and the guilty are refused for a while."""

import os
import struct
import time
from pathlib import Path

import pytest

from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.process.in_flight import LONGEST, InFlight, Mark, backbone_of, number_of, read
from hplm.process.suspects import CLEAN_ANSWERS, REMEMBERED_SECONDS, SUSPECTED_SECONDS, Separation, Suspects
from hplm.tenants.quarantine import SECONDS, Quarantine
from tests.support.message import mentions
from tests.support.wait import Clock

ENDS = {  # the tenants in batches at each end of the engine, and the second; who is guilty of the last one; who runs alone when
    "all of a batch are suspects": ([("abc", 0)], None, [(1, "abc")]),
    "who ends it alone is guilty, and clears the others": ([("abc", 0), ("a", 1)], "a", [(2, "a")]),
    "an end without a batch says nothing": ([("ab", 0), ("", 1)], None, [(1, "ab")]),
    "suspects of another end stay so": ([("ab", 0), ("cd", 1), ("c", 2)], "c", [(2, "abc")]),
    "a guilty one that was released is guilty again": ([("ab", 0), ("a", 1), ("a", 3601)], "a", [(3601, "a")]),
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


GUILTY = Mark(7, number_of(1, 3), "acme")


@pytest.mark.parametrize("harm", [None, "cannot be written", "has no folder"])
def test_the_guilty_tenant_is_refused_until_it_is_released_or_its_time_is_over(tmp_path, caplog, harm):
    """A quarantine that cannot be written holds all the same. No command can release it."""
    folder, gone = tmp_path / "shm", tmp_path / "gone"
    folder.mkdir()
    meters, both = [Meter(), Meter()], [Quarantine(Path("repository") / name, folder) for name in ("one", "two")]
    clock, none = Clock(time.time()), (frozenset(), frozenset())
    of_two = Separation(both, meters, clock)
    if harm is not None:
        both[1].put("acme")
        (file,) = folder.iterdir()
        file.unlink()
        file.mkdir()
    if harm == "has no folder":
        folder.rename(gone)
    of_two.ended([GUILTY])
    assert of_two.apart.quarantined == none
    of_two.ended([GUILTY])
    assert of_two.apart.quarantined == (frozenset(), {"acme"})
    assert [meter.take()[1][names.QUARANTINED_TENANTS, ()] for meter in meters] == [0, 1]
    assert mentions(caplog.text, "restart") == mentions(caplog.text, "no command") == (harm is not None)
    if harm is None:
        assert Separation(both, meters).apart.quarantined == (frozenset(), {"acme"}), "it does not outlive the process"
        assert both[1].release("acme")
    else:
        clock.sleep(SECONDS - 60)
        of_two.look()
        assert of_two.apart.quarantined == (frozenset(), {"acme"})
        if gone.exists():
            gone.rename(folder)
        clock.sleep(SECONDS + 60)
    of_two.look()
    assert of_two.apart.quarantined == none


PLACE = struct.Struct("<qqq")


@pytest.fixture
def memory():
    descriptor = os.memfd_create("batches")
    yield descriptor
    os.close(descriptor)


def test_all_batches_that_have_not_left_are_read(memory):
    """`tests/server/test_supervisor.py` reads those of a killed process."""
    shown = InFlight(2, 3, memory)
    shown.enter("computed", [Mark(1, 1, "a").packed()])
    shown.enter("computing", [Mark(2, 2, "b").packed(), Mark(3, 2, "b").packed()])
    shown.leave("computed")
    shown.enter("staged", [Mark(4, number_of(1, 1), "c").packed()])
    assert sorted(read(memory)) == [Mark(2, 2, "b"), Mark(3, 2, "b"), Mark(4, number_of(1, 1), "c")]
    assert [backbone_of(mark.tenant) for mark in sorted(read(memory))] == [0, 0, 1]
    shown.compute("computing")
    shown.compute("computed")
    assert sorted(read(memory, staged=False)) == [Mark(2, 2, "b"), Mark(3, 2, "b")]


def test_the_longest_marks_have_room(memory):
    shown, longest = InFlight(2, 3, memory), Mark(2**63, number_of(2**10, 2**64 - 1), "x" * 64)
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
