"""A process of ours beside a tritonserver or in a cluster: started, started again when it ends by itself, and stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hplm.clock import Clock
from hplm.errors import HplmError
from hplm.server import log, process_group

SYSTEM_FOLDER = "/usr/sbin"  # not on the PATH of Debian's users
# The process is told to end when the thread that started it is gone for any reason.
TIED = ("setpriv", "--pdeathsig", "SIGTERM")
SOON_SECONDS = 5.0  # a process that ends so soon is started after a longer pause
LONGEST_PAUSE = 30.0
LOOK_SECONDS = 0.1


class Process:
    """Runs in a session of its own, so that Ctrl-C in the terminal does not reach it. Start it from the main thread."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_file: Path,
        cores: Sequence[int] = (),
        descriptors: Sequence[int] = (),
        until_stdin_closes: bool = False,
        folder: str | None = None,
        clock: Clock = time,
    ) -> None:
        """`descriptors`: open files that it gets. `folder`: where it runs; None: where we do.

        `until_stdin_closes`: how it knows that it is to end, also when ours is gone. Any thread may start such a process.
        """
        self.name = name
        self.log_file = log_file
        self._cores = tuple(cores)
        self._descriptors = tuple(descriptors)
        self._until_stdin_closes = until_stdin_closes
        self._folder = folder
        self._time = clock
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._begins = 0  # of this start's part of the log
        self._since = self._pause = 0.0
        self._again_at: float | None = None  # when an ended process is started again
        self._is_to_end = False

    @property
    def pid(self) -> int | None:
        """The running process; None if it has ended or was not started."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        self._since, self._again_at, self._is_to_end = self._time.monotonic(), None, False
        pinned = ("taskset", "--cpu-list", ",".join(map(str, self._cores))) if self._cores else ()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if self._cores:
            environment["OMP_NUM_THREADS"] = str(len(self._cores))
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as output:
            self._begins = output.tell()
            self._process = subprocess.Popen(
                [*(() if self._until_stdin_closes else TIED), *pinned, *self._command],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.PIPE if self._until_stdin_closes else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=self._descriptors,
                start_new_session=True,
            )

    def said(self) -> str:
        """Returns what it has printed since it was started."""
        return log.read(self.log_file, self._begins)

    def wait_until(self, condition: Callable[[], object], seconds: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Waits until the process has come so far. Raises if it ends before or takes longer. `meanwhile` is called again."""
        deadline = self._time.monotonic() + seconds
        while not condition():
            if self.pid is None or self._time.monotonic() > deadline:
                why = "ended before it was ready" if self.pid is None else f"was not ready within {seconds:g} s"
                raise HplmError(f"{self.name} {why}; its log says:\n{self.last_words()}\n(whole log: {self.log_file})")
            meanwhile()
            self._time.sleep(LOOK_SECONDS)

    def finish(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Waits until the process ends. Raises if it fails or takes longer."""
        ended = self.wait_for_end(seconds, meanwhile)
        if not ended or self._process is None or self._process.returncode != 0:
            why = "failed" if ended else f"has not ended within {seconds:g} s"
            raise HplmError(f"{self.name} {why}; its log says:\n{self.last_words()}\n(whole log: {self.log_file})")

    def wait_for_end(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Returns whether the process ends within so many seconds."""
        deadline = self._time.monotonic() + seconds
        while self.pid is not None and self._time.monotonic() < deadline:
            meanwhile()
            self._time.sleep(LOOK_SECONDS)
        return self.pid is None

    def last_words(self) -> str:
        return "\n".join(f"  {line}" for line in log.tail(self.said()))

    def look(self, say: Callable[[str], None]) -> None:
        """Starts the process again if it has ended by itself."""
        code = self._process.poll() if self._process is not None else None
        if code is None or self._is_to_end:
            return
        now = self._time.monotonic()
        if self._again_at is None:
            process_group.kill(self._pid_of_group())  # what it may have left
            soon = now - self._since < SOON_SECONDS
            self._pause = min(LONGEST_PAUSE, max(1.0, 2 * self._pause)) if soon else 0.0
            self._again_at = now + self._pause
            later = f"; in {self._pause:g} s" if self._pause else ""
            say(f"restarting    {self.name} ended with {process_group.reason(code)}, see {self.log_file}{later}")
        if now >= self._again_at:
            self.start()

    def ask_to_end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends the signal, or closes standard input. From here on `look` does not start the process again."""
        self._is_to_end = True
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        elif self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid_of_group(), number)

    def stop(self, patience: float) -> None:
        """Asks the process to end, and kills it and what it has started after so many seconds."""
        if self._process is None:
            return
        self.ask_to_end()
        process_group.wait_until_gone(self._pid_of_group(), patience)
        process_group.kill(self._pid_of_group())
        self._process.wait()
        self._process = None

    def _pid_of_group(self) -> int:
        assert self._process is not None, "start the process first"
        return self._process.pid


def program(name: str, package: str) -> str:
    """Returns the path of a program of Debian or Ubuntu. Raises if it is not installed."""
    found = shutil.which(name) or shutil.which(name, path=SYSTEM_FOLDER)
    if found is None:
        raise HplmError(f"{name}: not found on PATH; install it (Debian, Ubuntu: apt-get install {package})")
    return found
