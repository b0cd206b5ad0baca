"""A worker never outlives the process that started it."""

import errno
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from builder.worker_processes import Killed, outcomes, worker_processes
from hplm.server.process_group import lives
from tests.support.here import Here
from tests.support.message import mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

OWNER = """
import os, time
from builder.worker_processes import worker_processes
if __name__ == "__main__":
    with worker_processes(2) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(600)
"""

# Its workers take long to import what they do.
STARTING = """
import time
from builder.worker_processes import worker_processes
if __name__ == "__main__":
    with worker_processes(2) as pool:
        pool.submit(print).result()
else:
    print("starting", flush=True)
    time.sleep(600)
"""


def run_script(path, script):
    """Starts a script in a process group, as a terminal does."""
    path.write_text(script)
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen([sys.executable, str(path)], env=os.environ | {"PYTHONPATH": os.getcwd()}, **given)


def test_work_is_finished_before_the_pool_ends_but_ended_by_an_error():
    """Another process may use their files as soon as the pool has ended."""
    with worker_processes(1) as pool:
        given = [pool.submit(math.sqrt, number * number) for number in range(20)]
    assert [one.result(0) for one in given] == list(range(20))
    with pytest.raises(TypeError), worker_processes(2) as pool:
        worker, given = pool.submit(os.getpid).result(), [pool.submit(time.sleep, 600) for _ in range(4)]
        math.sqrt("no number")
    assert all(one.done() for one in given) and not lives(worker)


def test_a_worker_ends_when_its_owner_is_killed(tmp_path):
    with run_script(tmp_path / "owner.py", OWNER) as owner:
        worker = int(owner.stdout.readline())
        running = lives(worker)
        owner.kill()
    assert running
    eventually(lambda: not lives(worker))


def test_ctrl_c_ends_workers_that_are_still_starting_and_says_so_once(tmp_path):
    with run_script(tmp_path / "starting.py", STARTING) as owner:
        assert owner.stdout.readline() == "starting\n"
        os.killpg(owner.pid, signal.SIGINT)
        _, said = owner.communicate(timeout=PATIENCE)  # until no worker has its output any more
    assert said.count("Traceback") == 1 and said.endswith("KeyboardInterrupt\n")


def test_the_others_go_on_beside_a_killed_one():
    """Its place is taken by another process."""
    with worker_processes(2) as pool:
        killed = [pool.submit(signal.raise_signal, signal.SIGKILL) for _ in range(2)]
        others = [pool.submit(math.sqrt, number * number) for number in range(4)]
        assert [one.result() for one in others] == [0, 1, 2, 3]
        assert all(isinstance(one.exception(), Killed) for one in killed)


def once(name, folder):
    """Fails as a job whose process is killed, or that lacks memory. Of these only `fatal` fails a second time."""
    mark = folder / name
    if name in ("fatal", "greedy", "short") and (name == "fatal" or not mark.exists()):
        mark.touch()
        raise MemoryError if name == "short" else Killed
    if name == "wrong":
        raise ZeroDivisionError("a bug")
    return name.upper()


def test_what_is_killed_lacks_memory_or_fails_is_named_and_the_others_go_on(tmp_path, capsys):
    names = ["fatal", "greedy", "short", "wrong", "modest"]
    found = [(name, result) for (name, _), result in outcomes(Here(), once, [(name, tmp_path) for name in names])]
    results = dict(found)
    assert [results[name] for name in ("greedy", "short", "modest")] == ["GREEDY", "SHORT", "MODEST"]
    assert "killed twice" in results["fatal"] and "ZeroDivisionError" in results["wrong"]
    assert {name for name, _ in found[:2]} == {"wrong", "modest"}, "what was killed comes last"
    assert mentions(capsys.readouterr().err, "a bug", "once")


def test_a_full_disk_ends_all():
    with pytest.raises(OSError, match="full"):
        list(outcomes(Here(), full, [("one", 0), ("two", 0)]))


def full(name, given):
    raise OSError(errno.ENOSPC, "full")
