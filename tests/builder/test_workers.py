"""A worker does not outlive who started it, however it ends."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from builder.workers import workers

OWNER = """
import os, time
from builder.workers import workers
if __name__ == "__main__":
    with workers(2) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(600)
"""


def test_an_error_ends_what_is_under_way():
    """What they work on is somebody else's as soon as it is over."""
    with pytest.raises(TypeError), workers(2) as pool:
        worker, given = pool.submit(os.getpid).result(), [pool.submit(time.sleep, 600) for _ in range(4)]
        math.sqrt("no number")
    assert all(one.done() for one in given) and not runs(worker)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_worker_ends_with_a_killed_owner(tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        worker = int(owner.stdout.readline())
        running = runs(worker)
        owner.kill()
    assert running
    until = time.monotonic() + 60
    while runs(worker):
        assert time.monotonic() < until, "a worker is left"
        time.sleep(0.05)
