"""Generations that the servers of a copy have taken, also servers that cannot be seen. The clock is played."""

import os
import time

import pytest

from hplm.follow.readers import Readers
from hplm.tenants.state import SILENT_SECONDS, STILL_SECONDS, UNSEEN_SECONDS, State

NOW = time.time()


class Machine:
    def __init__(self, folder):
        self.state = State(folder)
        self.state.readers.mkdir()
        self.time = 100.0
        self.readers = Readers(self.state, lambda: self.time)

    def play(self, name, generation, age=0.0):
        (self.state.readers / name).write_text(f"{generation}\n")
        os.utime(self.state.readers / name, (NOW - age, NOW - age))

    def taken(self, newest):
        return self.readers.taken(newest, NOW)

    def run(self, seconds, newest):
        """Looks often."""
        ends = self.time + seconds
        while self.time < ends:
            self.time = min(self.time + 0.05, ends)
            self.readers.taken(newest, NOW)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_readers_that_cannot_be_seen_get_the_time_that_managers_give_them(machine):
    assert machine.taken(3) == [-1]
    machine.run(UNSEEN_SECONDS + 0.01, 3)
    assert machine.taken(3) == [3] and machine.taken(4) == [3]
    machine.run(UNSEEN_SECONDS - 0.1, 4)
    assert machine.taken(4) == [3]
    machine.run(0.11, 4)
    assert machine.taken(4) == [4]


def test_a_silent_reader_gets_the_time_to_write_once_more(machine):
    machine.play("silent", 3, age=20)
    machine.play("awake", 4)
    assert sorted(machine.taken(4)) == [3, 4]
    machine.run(SILENT_SECONDS - 0.1, 4)
    assert sorted(machine.taken(4)) == [3, 4]
    machine.run(0.11, 4)
    assert machine.taken(4) == [4, 4]


def test_time_in_which_the_machine_was_stopped_does_not_count(machine):
    machine.taken(3)
    machine.time += 1000.0
    assert STILL_SECONDS < UNSEEN_SECONDS and machine.taken(3) == [-1]
