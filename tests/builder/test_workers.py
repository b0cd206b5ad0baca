"""Workers do not outlive who started them, however it ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

OWNER = """
import os, time
from builder.workers import workers
if __name__ == "__main__":
    with workers(2) as pool:
        pids = {pool.submit(os.getpid).result() for _ in range(8)} | {process.pid for process in pool._processes.values()}
        print(*pids, flush=True)
        time.sleep(600)
"""


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_end_with_a_killed_owner(tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        pids = list(map(int, owner.stdout.readline().split()))
        assert len(pids) == 2 and all(map(runs, pids))
        owner.kill()
    until = time.monotonic() + 60
    while any(map(runs, pids)):
        assert time.monotonic() < until, "workers are left"
        time.sleep(0.05)
