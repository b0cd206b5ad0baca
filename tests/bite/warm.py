"""Runs pytest in forks of a process that has imported torch, which takes longer than most faults' tests.

Reads a line of JSON for each run: its seconds, the file of its output, and pytest's arguments. Prints its exit code, or None
if it was late.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from multiprocessing import get_context

import pytest
import torch  # noqa: F401


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for line in sys.stdin:
        shutil.rmtree(".hypothesis", ignore_errors=True)
        seconds, output, *arguments = json.loads(line)
        process = get_context("fork").Process(target=run, args=(output, arguments))
        process.start()
        try:
            process.join(seconds)
            code = process.exitcode
        finally:  # ends what it has started too
            for number in (signal.SIGINT, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid or 0, number)
                process.join(20)
        print(code, flush=True)


def run(output: str, arguments: list[str]) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for path, flags, numbers in ((os.devnull, os.O_RDONLY, [0]), (output, os.O_WRONLY | os.O_APPEND, [1, 2])):
        opened = os.open(path, flags)
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)
    sys.exit(pytest.main(arguments))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
