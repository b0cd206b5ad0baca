"""Starts, drains and stops one tritonserver process with all its resources."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hplm.errors import HplmError
from hplm.location import Location
from hplm.server import inherited, log, process_group, reply_sockets
from hplm.server.control import Control
from hplm.server.discovery import find_backends, find_installation
from hplm.server.flags import SECRET_HEADER, contract_flags
from hplm.server.held import holders, wait_until_idle
from hplm.server.ports import Ports, in_use, listens_at, reachable, resolve
from hplm.server.process import Process, Tie
from hplm.server.repository import model_names
from hplm.server.stubs import make_private, region_prefix

DRAIN_SECONDS = 10.0  # for requests in flight when a server is stopped
_EXIT_TIMEOUT_S = 10  # how long Triton itself waits after a SIGTERM from somebody else
_EMPTY_SERVER_GRACE_S = 2.0
_ATTEMPTS = 3  # at ports that are free when they are chosen, but may be taken before Triton listens on them
_STOOD_STILL = "boost::interprocess::lock_exception"  # Triton's last words if a model's process did not move for a second


class TritonServer:
    """Serves every model of a repository.

    Port 0 means any free port. Without `log_file`, the log is deleted when the server stops.
    """

    def __init__(
        self,
        repository: Path,
        address: str = "127.0.0.1",
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        log_file: Path | None = None,
        state: Location | None = None,
        extra_args: Sequence[str] = (),
        start_timeout: float = 300.0,
    ) -> None:
        self.repository = Path(repository).resolve()
        self.models = model_names(self.repository)
        self.address = resolve(address)
        self.installation = find_installation()
        self.log_file = Path(log_file).resolve() if log_file else None
        self._keeps_log = log_file is not None
        self._backends = find_backends()
        self._state = state.resolve() if isinstance(state, Path) else state
        self._extra_args = tuple(extra_args)
        self._start_timeout = start_timeout
        self._wanted = self._ports = Ports(http_port, grpc_port, metrics_port)
        # The id is the server's name in /v2, and begins the names of its files in /dev/shm, so that they are known to be ours.
        self.id = f"hplm-{secrets.token_hex(6)}"
        self._secret = _admin_secret()
        self.restarts = 0
        self._process: Process | None = None
        self._leftovers = ExitStack()

    def __enter__(self) -> TritonServer:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        return self._url(self._ports.http)

    @property
    def grpc_url(self) -> str:
        return self._url(self._ports.grpc)

    @property
    def metrics_url(self) -> str:
        return self._url(self._ports.metrics)

    @property
    def pid(self) -> int | None:
        """The running process; None if it has ended or was not started."""
        return self._process.pid if self._process else None

    @property
    def group(self) -> int | None:
        """The process group of the server and its models, also if the server has ended by itself."""
        return self._process.group if self._process else None

    @property
    def admin_header(self) -> tuple[str, str]:
        """The header that opens the restricted APIs of this server."""
        return SECRET_HEADER, self._secret

    def start(self) -> TritonServer:
        """Starts the server. Returns when every model is ready.

        A busy machine may keep the processes of models still again and again, so that only the time for a start ends that.
        """
        deadline = time.monotonic() + self._start_timeout
        try:
            ports_lost = 0
            while True:
                self._ports = self._wanted.claim(self.address)
                process = self._launch()
                if self._becomes_ready(process, deadline):
                    return self
                failure, chosen = self._failure(process), dict(self._wanted.items())
                if any(chosen[flag] == 0 for flag, _ in self._lost_ports(process)):
                    ports_lost += 1
                    goes_on = ports_lost < _ATTEMPTS
                else:
                    goes_on = _STOOD_STILL in process.output() and time.monotonic() < deadline
                if not goes_on:
                    raise failure
                self.stop()
        except BaseException:
            self.stop(drain=0)
            raise

    def start_again(self) -> None:
        """Ends the server, which closes every connection, and starts it at the same addresses."""
        self.stop(drain=0)
        self._wanted = self._ports
        self.restarts += 1
        self.start()

    def wait(self, seconds: float | None = None) -> int | None:
        """Waits until tritonserver ends by itself. Returns its exit code, or None if it does not end in so many seconds."""
        assert self._process is not None, "start the server first"
        return self._process.wait(seconds)

    def last_words(self) -> str:
        """Returns the errors in the log."""
        return "\n".join(f"  {line}" for line in log.complaints(self._process.output() if self._process else ""))

    def control(self) -> Control:
        """Returns what calls this server's restricted APIs."""
        host = reachable(self.address)
        return Control(host, self._ports.http, dict([self.admin_header]))

    def leave(self, notice: float) -> None:
        """Fails probes for so many seconds, and answers all else, so that routers send no more requests before it stops."""
        if self.pid is not None:
            inherited.start_to_leave(inherited.server_name(self.id, self.pid))
        time.sleep(notice)

    def stop(self, drain: float = DRAIN_SECONDS) -> None:
        """Waits up to `drain` seconds for requests in flight, then stops all processes and removes temporary files."""
        try:
            if self._process and self._process.pid:
                is_idle = drain and self._drain(time.monotonic() + drain)
                # A trace is complete only if tritonserver ends by itself.
                traces = any(flag.startswith("--trace") for flag in self._extra_args)
                self._process.stop(0 if is_idle and not traces else _EMPTY_SERVER_GRACE_S)
        finally:  # also when a second Ctrl-C comes while the models drain
            self._leftovers.close()
            self._process = None

    def _drain(self, deadline: float) -> bool:
        """Lets models that count what they hold refuse new requests and answer the rest, and unloads the others.

        Returns whether any of them count, and may be killed now. SIGTERM would be worse: Triton waits for idle connections, and
        unloads the models while it still takes requests, so that clients are told that there is no such model (404).
        """
        assert self.pid is not None, "the server runs"
        inherited.start_to_drain(inherited.server_name(self.id, self.pid))
        holding = {holder.model for holder in holders(self.id)}
        self.control().drain(deadline, keep=holding)
        wait_until_idle(self.id, deadline)
        return bool(holding)

    def _launch(self) -> Process:
        folder = Path(tempfile.mkdtemp(prefix=f"{self.id}-"))
        self._leftovers.callback(shutil.rmtree, folder, ignore_errors=True)
        held = os.open(folder, os.O_RDONLY)
        self._leftovers.callback(os.close, held)
        fcntl.flock(held, fcntl.LOCK_SH)  # systemd-tmpfiles, which cleans temporary files, leaves a locked folder alone
        self.installation.lay_out(folder, *self._backends)
        environment = self.installation.environment(folder, os.environ)
        environment |= inherited.environment(self.id, self.restarts)
        environment.pop("HPLM_STATE", None)
        if self._state:
            environment["HPLM_STATE"] = str(self._state)
        if self.log_file is None or not self._keeps_log:
            self.log_file = folder / "tritonserver.log"
        _check_log(self.log_file)
        process = self._process = Process(
            *("tritonserver", self._command(folder), self.log_file),
            folder=folder,  # the stub imports from its working directory first
            environment=environment,
            tie=Tie.NONE,  # there is a watchdog
        )
        self._leftovers.callback(process_group.sweep, self.id)
        self._leftovers.callback(process.stop, 0)
        try:
            process.start()
        except OSError as error:
            raise HplmError(f"{self.installation.binary} does not start ({error.strerror}): install it again") from error
        command = [sys.executable, "-I", "-S", process_group.__file__]
        command += [str(os.getpid()), str(process.group), self.id, str(folder)]
        watchdog = Process("the watchdog", command, Path(os.devnull), tie=Tie.NONE)
        self._leftovers.callback(watchdog.stop, 0)
        watchdog.start()
        return process

    def _command(self, folder: Path) -> list[str]:
        return [
            str(self.installation.binary),
            f"--id={self.id}",
            f"--model-repository={self.repository}",
            f"--backend-directory={self.installation.backend_directory(folder)}",
            f"--backend-config=python,shm-region-prefix-name={region_prefix(self.id)}",
            f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
            f"--http-address={self.address}",
            f"--grpc-address={self.address}",
            f"--metrics-address={self.address}",
            *(f"{flag}={port}" for flag, port in self._ports.items()),
            *contract_flags(self._secret),
            *self._extra_args,
        ]

    def _becomes_ready(self, process: Process, deadline: float) -> bool:
        control = self.control()

        def is_ready() -> bool:
            pid = process.pid
            # Others, who answer too, may have taken a port that was free. That of metrics is the last one.
            return bool(pid) and control.ready() and listens_at(pid, (self._ports.http, self._ports.metrics))

        if not process.comes_to(is_ready, deadline - time.monotonic()) or not (pid := process.pid):
            return False
        make_private(self.id)
        reply_sockets.widen(pid)
        return True

    def _failure(self, process: Process) -> HplmError:
        if process.pid:
            what, said = f"tritonserver was not ready within {self._start_timeout:.0f} s", self.last_words()
        else:
            for flag, port in self._lost_ports(process):
                return HplmError(in_use(self.address, port, flag))
            what, said = f"tritonserver could not serve {self.repository}", self.last_words()
        where = f"\n(whole log: {self.log_file})" if self._keeps_log else ""
        return HplmError(f"{what}; its log says:\n{said}{where}")

    def _lost_ports(self, process: Process) -> list[tuple[str, int]]:
        said = process.output()
        return [(flag, port) for flag, port in self._ports.items() if f":{port}' already in use" in said]

    def _url(self, port: int) -> str:
        return f"{reachable(self.address)}:{port}"


def _admin_secret() -> str:
    given = os.environ.get("HPLM_ADMIN")
    if given and not re.fullmatch(r"[\w.-]+", given, re.ASCII):
        raise HplmError("HPLM_ADMIN may have letters, digits, '.', '_' and '-' only: choose another secret")
    return given or secrets.token_hex(16)


def _check_log(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise HplmError(f"cannot open log file {path} ({error.strerror}): name another with --log-file") from error
