"""Process groups are ended whole. `hplm serve` that is killed is in test_serve_command.py."""

import os
import signal
import subprocess
import sys

from hplm.server import process_group

LEADER_WITH_CHILD = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in sys.argv else signal.SIG_DFL)
subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
time.sleep(600)
"""


def group(*manners: str) -> subprocess.Popen:
    command = [sys.executable, "-c", LEADER_WITH_CHILD, *manners]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout.readline() == b"up\n"
    return leader


def test_a_process_that_ignores_sigterm_is_killed_with_its_children():
    with group("stubborn") as leader:
        assert len(process_group.members(leader.pid)) == 2
        process_group.stop(leader.pid, grace=0.1)
        assert process_group.members(leader.pid) == []


def test_children_of_a_dead_leader_still_belong_to_its_group():
    with group("stubborn") as leader:
        os.kill(leader.pid, signal.SIGKILL)
        leader.wait()
        assert len(process_group.members(leader.pid)) == 1
        process_group.stop(leader.pid, grace=0)
        assert process_group.members(leader.pid) == []
