"""A scratch copy of the tree, into which faults are put and in which their tests run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.bite.faults import Fault

ENDED = re.compile(r"^(?:FAILED|ERROR) (?P<test>\S.*?)(?: - (?P<said>.*))?$", re.MULTILINE)
STARTED = re.compile(r"^(\S+::.*?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL).*)?$", re.MULTILINE)
CHECK = "import hplm, builder, backends, hplm_client; print(hplm.__file__, builder.__file__, hplm_client.__file__)"


@dataclass(frozen=True)
class Outcome:
    name: str
    outcome: str  # found, missed, limit (its time was over), or stale
    seconds: float
    test: str = ""  # that failed first, or ran when the time was over
    said: str = ""  # the first line of its message


@dataclass(frozen=True)
class _Ran:
    failed: str = ""
    said: str = ""
    is_over: bool = False  # its time


class Scratch:
    """Copies tracked files, those that git does not ignore, and compiled kernels. The caller's tree is never written."""

    def __init__(self, root: Path) -> None:
        self._made = tempfile.TemporaryDirectory(prefix="hplm-bite-")
        self._running: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self.root = Path(self._made.name) / "tree"
        listed = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
        kernels = [str(path.relative_to(root)) for path in root.glob("hplm/*/_kernel*.so")]
        for name in [*filter(None, names), *kernels]:
            if (root / name).is_file():
                target = self.root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, target, follow_symlinks=False)
        if (root / ".venv").exists():
            (self.root / ".venv").symlink_to(root / ".venv")
        path = os.pathsep.join([str(self.root), str(self.root / "clients"), os.environ.get("PYTHONPATH", "")])
        self._environment = {
            **os.environ,
            "PYTHONPATH": path.rstrip(os.pathsep),
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": "2",
            "COLUMNS": "1000",
        }
        for file in subprocess.run(
            [sys.executable, "-c", CHECK], cwd=self.root, env=self._environment, check=True, capture_output=True, text=True
        ).stdout.split():
            if not Path(file).is_relative_to(self.root):
                raise RuntimeError(f"{file} would be tested instead of the copy in {self.root}")

    def close(self) -> None:
        self._made.cleanup()

    def stop(self) -> None:
        """Ends the tests that run, if any. No others can run."""
        self._stopped = True
        if self._running is not None and self._running.poll() is None:
            _end(self._running)

    def bite(self, fault: Fault, limit: float, slow: bool) -> Outcome:
        """Puts a fault in, runs its tests, and takes it out. What fails without the fault too does not count."""
        began = time.monotonic()
        if said := fault.stale(self.root):
            return Outcome(fault.name, "stale", 0.0, "", said)
        left_out: list[str] = []
        tests = fault.tests(self.root)
        for is_slow in (False, True) if slow else (False,):
            while True:
                before = fault.put_into(self.root)
                try:
                    ran = self._run(tests, left_out, is_slow, began + limit)
                finally:
                    for file, text in before.items():
                        file.write_text(text, "utf-8")
                seconds = round(time.monotonic() - began, 1)
                if ran.is_over:
                    return Outcome(fault.name, "limit", seconds, ran.failed)
                if not ran.failed:
                    break
                alone = self._run([ran.failed], [], is_slow, time.monotonic() + limit)
                if not (alone.failed or alone.is_over):
                    return Outcome(fault.name, "found", seconds, ran.failed, ran.said)
                left_out.append(ran.failed)
        return Outcome(fault.name, "missed", round(time.monotonic() - began, 1))

    def _run(self, tests: list[str], left_out: list[str], slow: bool, until: float) -> _Ran:
        if self._stopped:
            raise InterruptedError("this copy was stopped")
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)
        command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["--hypothesis-profile=found", *(["-m", "slow" if slow else "not slow"] if "::" not in tests[0] else [])]
        command += [f"--deselect={test}" for test in left_out]
        with tempfile.TemporaryFile() as output:
            process = self._running = subprocess.Popen(
                [*command, *tests], cwd=self.root, env=self._environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(max(1.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            _end(process)
            output.seek(0)
            text = output.read().decode(errors="replace")
        if code is None:
            return _Ran("".join(STARTED.findall(text)[-1:]), is_over=True)
        if first := ENDED.search(text):
            return _Ran(first["test"], first["said"] or "")
        if code not in (0, 5):  # 5: no test was chosen
            return _Ran("pytest itself", (text.strip().splitlines() or [""])[-1])
        return _Ran()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a run and what it has started."""
    for number, patience in ((signal.SIGINT, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
