import os
import signal
import subprocess
import sys
import textwrap
import time

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


def test_the_watchdog_ends_the_group_when_the_parent_is_killed(tmp_path):
    region = process_group.SHARED_MEMORY / f"hplm-test-{os.getpid()}-region"
    region.write_bytes(b"x")
    folder = tmp_path / "folder"
    folder.mkdir()
    with group() as leader:
        parent = subprocess.Popen(
            [
                sys.executable,
                "-c",
                textwrap.dedent(f"""
            import os, subprocess, sys, time
            subprocess.Popen([sys.executable, "-I", "-S", {process_group.__file__!r}, str(os.getpid()), "{leader.pid}",
                              "{region.name}", {str(folder)!r}], start_new_session=True)
            time.sleep(600)
        """),
            ]
        )
        try:
            time.sleep(1.0)
            assert len(process_group.members(leader.pid)) == 2  # the parent lives, so does the group
        finally:
            parent.kill()
            parent.wait()
        wait_for(lambda: not process_group.members(leader.pid))
    wait_for(lambda: not region.exists())
    wait_for(lambda: not folder.exists())


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
