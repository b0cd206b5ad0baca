"""A command of hplm as a child process: it computes at the lowest priority, or at a low one, and ends with the manager."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hplm.errors import HplmError
from hplm.server import process_group

SECRETS = ("HPLM_ADMIN", "HPLM_API_KEY")  # no command that a child runs needs them
HPLM = (sys.executable, "-m", "hplm.cli.main")
LOOK_SECONDS = 0.05
PROGRESS = "progress.jsonl"
LONGEST_OUTPUT = 4_000_000  # bytes that are read


@dataclass(frozen=True)
class Manner:
    """How children run."""

    cores: Sequence[int] = ()  # empty: all
    memory: int = 0  # bytes of data that a child may have; 0: no limit
    device: str = "auto"  # that trains
    seconds: int = 0  # of processors that a child may take; 0: no limit
    is_awaited: bool = False  # somebody waits for its end: it computes beside others, at a low priority
    who: str = ""  # as whom a child changes the registry; empty: as this process's user

    @property
    def nice(self) -> int:
        return 10 if self.is_awaited else 19

    @property
    def wrapped(self) -> list[str]:
        cores = ["taskset", "--cpu-list", ",".join(map(str, self.cores))] if self.cores else []
        limits = [f"--data={self.memory}"] if self.memory else []
        limits += [f"--cpu={self.seconds}:{self.seconds + 30}"] if self.seconds else []  # SIGXCPU, then SIGKILL
        limited = ["prlimit", *limits] if limits else []
        priority = ["nice", "-n", str(self.nice), *([] if self.is_awaited else ["chrt", "--idle", "0"])]
        return ["setpriv", "--pdeathsig", "SIGKILL", *cores, *limited, *priority]


USUAL = Manner()


class Child:
    """Belongs to the thread that has made it: it is killed if that thread ends before."""

    def __init__(self, words: Sequence[object], folder: Path, manner: Manner) -> None:
        """`words`: of the command, behind `hplm`. `folder`: for its output, and how far it is."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.code: int | None = None  # with which it has ended
        self.seconds = 0.0  # of processors, once it has ended
        self._out, self._log = folder / f"{words[0]}.out", folder / f"{words[0]}.log"
        environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
        environment["HPLM_PROGRESS"] = str(folder / PROGRESS)
        environment |= {"LOGNAME": manner.who} if manner.who else {}
        if manner.cores:
            environment["OMP_NUM_THREADS"] = str(len(manner.cores))
        with self._out.open("wb") as out, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*manner.wrapped, *HPLM, *map(str, words), "--json"],
                cwd="/",  # Python imports from its working directory first
                env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid  # also of its group
        with suppress(OSError):  # where Linux groups sessions, priorities count inside of a group only, and a group has its own
            Path(f"/proc/{self.pid}/autogroup").write_text(str(manner.nice))

    def look(self) -> bool:
        """Returns whether it has ended."""
        if self.code is None:
            pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self.code = self._process.returncode = os.waitstatus_to_exitcode(status)
                self.seconds = used.ru_utime + used.ru_stime
                process_group.kill(pid)  # what it may have left
        return self.code is not None

    def ask_to_end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.code is None:
            os.killpg(self._process.pid, number)

    def result(self) -> dict[str, Any] | None:
        """Returns what it has said under --json; None: nothing."""
        lines = _read(self._out).splitlines()
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError:
            return None

    def sentence(self) -> str:
        """Returns the command's error, or what it has said last."""
        said = [line for line in _read(self._log).splitlines() if line.strip()]
        errors = [line.partition(": ")[2] for line in said if line.startswith("hplm ")]
        return [*said[-1:], *errors[-1:], f"the command ended with {process_group.reason(self.code or 0)}"][1 if errors else 0]


def finish(words: Sequence[object], folder: Path, manner: Manner) -> dict[str, Any]:
    """Runs a command to its end. Returns its result, or raises its error."""
    child = Child(words, folder, manner)
    while not child.look():
        time.sleep(LOOK_SECONDS)
    if child.code or (found := child.result()) is None:
        raise HplmError(child.sentence())
    return found


def _read(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LONGEST_OUTPUT))
        return file.read().decode("utf-8", "replace")
