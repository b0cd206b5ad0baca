"""The gateway (`clients/hplm_openai`) as a process beside a tritonserver."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from hplm.errors import HplmError
from hplm.server.ports import listen, reachable, resolve
from hplm.server.process import Process, Tie

NEEDED = ("hplm_openai", "starlette", "uvicorn", "tritonclient")
SECONDS_TO_DRAIN = 12.0  # it gives its own answers ten
LOOK_SECONDS = 1.0


class GatewayProcess:
    """Holds the listening socket, so that clients who connect while the process is started again only wait."""

    def __init__(self, address: str, port: int, say: Callable[[str], None]) -> None:
        for package in NEEDED:
            try:
                found, why = find_spec(package), ""
            except (ImportError, ValueError) as error:  # of a hook that forbids it, or of a module that nothing has loaded
                found, why = None, f" ({error})"
            if found is None:
                raise HplmError(
                    f"--openai-port needs {package}{why}: install it in the checkout with `pip install -e 'clients[openai]'`"
                )
        self._listening = listen(resolve(address), port, "--openai-port")
        self._say = say
        self._process: Process | None = None
        self._ending = threading.Event()
        self._looking: threading.Thread | None = None

    def __enter__(self) -> GatewayProcess:
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
        descriptor = self._listening.fileno()
        command = [*(sys.executable, "-m", "hplm_openai", "--url", grpc_url), "--until-stdin-closes"]
        command += ["--socket", str(descriptor)]
        # Python imports from its working directory first.
        self._process = Process("the gateway", command, log, descriptors=[descriptor], folder="/", tie=Tie.STDIN)
        self._process.start()
        self._looking = threading.Thread(target=self._look_until_ending, args=(self._process,), name="gateway", daemon=True)
        self._looking.start()

    def _look_until_ending(self, process: Process) -> None:
        """In a thread of its own: who starts the tritonserver again may be busy for minutes."""
        while not self._ending.wait(LOOK_SECONDS):
            process.look(self._say)

    def drain(self) -> None:
        """Lets the process refuse new connections, and end when it has answered its requests. Returns soon."""
        self._ending.set()
        if self._looking:
            self._looking.join()
        self._listening.close()
        if self._process:
            self._process.ask_to_end()

    def stop(self) -> None:
        self.drain()
        if self._process:
            self._process.stop(SECONDS_TO_DRAIN)
