"""Processes that used the processor: a busy one, an idle one, and one that has ended."""

from __future__ import annotations

import subprocess
import sys

from loadtest.processor import ProcessorTime
from tests.support.wait import eventually


def test_busy_processes_and_ended_ones_are_told_apart() -> None:
    python = [sys.executable, "-S", "-c"]
    with subprocess.Popen([*python, "while True: pass"]) as busy, subprocess.Popen(["sleep", "600"]) as idle:
        try:
            processor = ProcessorTime({"busy": lambda: [busy.pid], "idle": lambda: [idle.pid]})
            eventually(lambda: processor.cores()["busy"] > 0)
            assert processor.cores()["clients"] == 0
            subprocess.run([*python, "import time\nwhile time.process_time() < 1: pass"], check=True)
            cores = processor.cores()
        finally:
            busy.kill()
            idle.kill()
    assert cores["busy"] > 0 and cores["clients"] > 0
    assert cores["idle"] == 0 <= cores["others"]
