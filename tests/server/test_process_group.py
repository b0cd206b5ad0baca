import os
import signal
import subprocess
import sys
from pathlib import Path

from hplm.server import process_group
from tests.support.wait import eventually

LEADER_WITH_CHILD = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in sys.argv else signal.SIG_DFL)
subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
time.sleep(600)
"""

PARENT = f"""
import os, subprocess, sys, time
watchdog = [sys.executable, "-I", "-S", {process_group.__file__!r}, str(os.getpid()), *sys.argv[1:]]
process = subprocess.Popen(watchdog, start_new_session=True)
print(process.pid, flush=True)
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


def test_the_watchdog_ends_the_group_when_the_parent_is_killed(tmp_path):
    region = process_group.SHARED_MEMORY / f"hplm-test-{os.getpid()}-region"
    region.write_bytes(b"x")
    folder = tmp_path / "folder"
    folder.mkdir()
    with group() as leader:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(leader.pid), region.name, str(folder)], stdout=subprocess.PIPE
        )
        try:
            watchdog = int(parent.stdout.readline())
            before = times_slept(watchdog)
            eventually(lambda: times_slept(watchdog) > before + 5)
            assert len(process_group.members(leader.pid)) == 2  # the parent lives, so does the group
        finally:
            parent.kill()
            parent.wait()
        eventually(lambda: not process_group.members(leader.pid))
    eventually(lambda: not region.exists())
    eventually(lambda: not folder.exists())


def times_slept(pid: int) -> int:
    """Returns how often a process has let go of its core."""
    (line,) = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("voluntary")]
    return int(line.split()[1])
