"""A worker does not outlive who started it, however it ends."""

import math
import os
import subprocess
import sys
import time
from concurrent.futures import wait
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


def test_an_error_begins_nothing_more():
    with pytest.raises(TypeError), workers(1) as pool:
        given = [pool.submit(math.sqrt, "no number"), *(pool.submit(time.sleep, 0.2) for _ in range(20))]
        given[0].result()
    wait(given, 60)
    assert any(one.cancelled() for one in given)


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
