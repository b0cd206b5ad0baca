"""The notes of an engine's batches can be read after its end, however it ended."""

import os
import struct
import subprocess
import sys

import pytest

from hplm.engine.in_flight import LONGEST, InFlight, Mark, backbone_of, number_of, read

PLACE = struct.Struct("<qq")
ENDS = """
import os, signal, sys
from hplm.engine.in_flight import InFlight, Mark
shown = InFlight(2, 3, int(sys.argv[1]))
shown.enter("computed", [Mark(1, 1, "a").packed()])
shown.enter("computing", [Mark(2, 2, "b").packed(), Mark(3, 2, "b").packed()])
shown.leave("computed")
shown.enter("staged", [Mark(4, 1 << 64 | 1, "c").packed()])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def memory():
    descriptor = os.memfd_create("batches")
    yield descriptor
    os.close(descriptor)


def test_all_batches_of_a_killed_process_are_read(memory):
    subprocess.run([sys.executable, "-c", ENDS, str(memory)], pass_fds=[memory], timeout=120)
    assert sorted(read(memory)) == [Mark(2, 2, "b"), Mark(3, 2, "b"), Mark(4, number_of(1, 1), "c")]
    assert [backbone_of(mark.tenant) for mark in sorted(read(memory))] == [0, 0, 1]


def test_the_longest_marks_have_room(memory):
    shown, longest = InFlight(2, 3, memory), Mark(2**63, number_of(2**10, 2**64 - 1), "x" * 64)
    assert len(longest.packed()) <= LONGEST
    for batch in range(2):
        shown.enter(batch, [longest.packed()] * 4)  # one more than was said
    assert list(read(memory)) == [longest] * 6


@pytest.mark.parametrize("damage", [(-16, 0), (8, 0), (1 << 40, 0), (408, -1), (408, 1 << 40), (408, 393)])
def test_damaged_memory_is_told_from_an_engine_that_had_nothing(memory, damage):
    InFlight(2, 3, memory)
    assert PLACE.unpack(os.pread(memory, PLACE.size, 400)) == (400, 0)
    os.pwrite(memory, PLACE.pack(*damage), 400)
    with pytest.raises(ValueError):
        list(read(memory))
