"""The OpenAI-compatible gateway (`clients/hplm_openai`) as a process beside a tritonserver."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from hplm.errors import HplmError
from hplm.server import process_group
from hplm.server.ports import listen, reachable, resolve

NEEDED = ("hplm_openai", "starlette", "uvicorn", "tritonclient")
SECONDS_TO_DRAIN = 12.0  # it gives its own answers ten
SOON_SECONDS = 5.0  # a gateway that ends so soon is started after a longer pause
LONGEST_PAUSE = 30.0
LOOK_SECONDS = 1.0


class Gateway:
    """Holds the listening socket, so that clients who connect while the process is started again only wait."""

    def __init__(self, address: str, port: int, say: Callable[[str], None]) -> None:
        for package in NEEDED:
            if find_spec(package) is None:
                raise HplmError(
                    f"--openai-port needs {package}: install it in the checkout with `pip install -e 'clients[openai]'`"
                )
        self._listening = listen(resolve(address), port, "--openai-port")
        self._say = say
        self._command: list[str] = []
        self._log = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._pause = 0.0
        self._since = 0.0
        self._again_at: float | None = None  # when an ended process is started again
        self._ending = threading.Event()
        self._looking: threading.Thread | None = None

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        host, port = self._listening.getsockname()
        return f"http://{reachable(host)}:{port}/v1"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, grpc_url: str, log: Path) -> None:
        """Starts the process, and from now on starts it again when it has ended.

        `grpc_url`: the tritonserver; `log`: what it appends its errors to.
        """
        self._command = [
            *(sys.executable, "-m", "hplm_openai", "--url", grpc_url, "--until-stdin-closes"),
            *("--socket", str(self._listening.fileno())),
        ]
        self._log = log
        self._launch()
        self._looking = threading.Thread(target=self._look_until_ending, name="gateway", daemon=True)
        self._looking.start()

    def _look_until_ending(self) -> None:
        """In a thread of its own: who starts the tritonserver again may be busy for minutes."""
        while not self._ending.wait(LOOK_SECONDS):
            try:
                self._look()
            except OSError as error:  # the next look tries again
                self._say(f"restarting    the OpenAI gateway does not start ({error})")

    def _look(self) -> None:
        """Starts the process again if it has ended."""
        code = self._process.poll() if self._process else None
        if code is None:
            return
        now = time.monotonic()
        if self._again_at is None:
            soon = now - self._since < SOON_SECONDS
            self._pause = min(LONGEST_PAUSE, max(1.0, 2 * self._pause)) if soon else 0.0
            self._again_at = now + self._pause
            ended = process_group.reason(code)
            later = f"; in {self._pause:g} s" if self._pause else ""
            self._say(f"restarting    the OpenAI gateway ended with {ended}, and the log may say why{later}")
        if now >= self._again_at:
            self._launch()

    def drain(self) -> None:
        """Lets the process refuse new connections, and end when it has answered its requests. Returns soon."""
        self._ending.set()
        if self._looking:
            self._looking.join()
        self._listening.close()
        if self._process and self._process.stdin:
            with suppress(BrokenPipeError):
                self._process.stdin.close()  # it ends when standard input does; so it does too if this process is killed

    def stop(self) -> None:
        self.drain()
        if self._process:
            try:
                self._process.wait(SECONDS_TO_DRAIN)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _launch(self) -> None:
        self._since, self._again_at = time.monotonic(), None
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd="/",  # Python imports from its working directory first
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[self._listening.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal must not reach it: we stop it
            )
