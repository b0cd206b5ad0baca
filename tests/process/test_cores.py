"""An engine gives up cores that other programs use, and tries them again."""

import subprocess
import sys

import pytest

from hplm.process.cores import DELAYED, FIRST_PAUSE_S, JUDGED_S, LONGEST_PAUSE_S, Cores


class Machine:
    """A clock, and threads that wait for cores for a share of the time that is computed."""

    def __init__(self, threads):
        self.now, self.share, self.delayed, self.divided = 0.0, 0.0, 0, []
        self.cores = Cores(threads, lambda: round(self.delayed), lambda: self.now, self.divided.append)

    def compute(self, seconds=1.5 * JUDGED_S):
        with self.cores:
            self.now += seconds
            self.delayed += 1e9 * seconds * self.share
        return self.cores.threads

    def wait(self, seconds):
        self.now += seconds


def test_half_as_many_threads_divide_when_others_use_the_cores():
    machine = Machine(8)
    assert machine.compute() == 8
    machine.share = 1.1 * DELAYED
    assert [machine.compute() for _ in range(4)] == [4, 2, 1, 1]
    assert machine.divided == [4, 2, 1]


def test_what_is_short_is_judged_together():
    machine = Machine(2)
    machine.share = 1.0
    assert [machine.compute(0.3 * JUDGED_S) for _ in range(4)] == [2, 2, 2, 1]


def test_more_threads_are_tried_after_longer_and_longer_pauses():
    machine, pauses = Machine(2), []
    machine.share = 1.0
    machine.compute()
    for _ in range(8):
        gave_up = machine.now
        while machine.cores.threads == 1:
            machine.wait(FIRST_PAUSE_S / 2)
            machine.compute(JUDGED_S / 2)
        pauses.append(machine.now - gave_up)
        machine.compute()
    assert [round(pause) for pause in pauses[:7]] == [1, 2, 4, 8, 16, 32, 64]
    assert pauses[0] == pytest.approx(FIRST_PAUSE_S, rel=0.1)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, rel=0.1)


def test_pauses_are_short_again_after_a_time_without_others():
    machine = Machine(2)
    for _ in range(5):
        machine.share = 1.0
        machine.compute()
        machine.wait(LONGEST_PAUSE_S)
    machine.share = 0.0
    machine.compute()
    machine.wait(LONGEST_PAUSE_S)
    assert machine.compute() == 2
    machine.share = 1.0
    assert machine.compute() == 1
    machine.wait(FIRST_PAUSE_S)
    machine.share = 0.0
    assert machine.compute() == 2


def test_one_thread_asks_for_nothing():
    def never():
        raise AssertionError("there is nothing to divide")

    cores = Cores(1, never)
    with cores:
        pass


def test_the_system_says_how_long_divided_products_wait_for_cores():
    """Two threads of OpenMP on one core: each waits for the other. Python's other threads do not count."""
    code = """
import os, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
from hplm.process.cores import delayed_ns
torch.set_num_threads(2)
x = torch.randn(1000, 1000)
before = delayed_ns()
while delayed_ns() - before < 1e6:
    x @ x
print("waited")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "waited\n", done.stderr
