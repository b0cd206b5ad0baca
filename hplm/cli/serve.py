"""`hplm serve`: runs a tritonserver in the foreground, and starts again what has ended."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

from hplm.cli.options import NotNegative, Positive, about, read
from hplm.cli.served import VARIABLE, state_of
from hplm.location import Location, location_of

MUST_EXIST = "HPLM_STATE_MUST_EXIST"
NAMED = 5


STATE = (
    "folder for changes that are made while the server runs, or the address of a bucket, such as s3://bucket/hplm "
    f"(default: the variable {VARIABLE})"
)
FLAGS = "after --: more flags for tritonserver, such as --trace-config=rate=1; paths in them are absolute"


def serve(
    *flags: Annotated[str, about(FLAGS)], repository: Path = Path("model_repository"),
    state: Annotated[Location | None, read(location_of, help=STATE)] = None, address: str = "127.0.0.1",
    http_port: int = 8000, grpc_port: int = 8001, metrics_port: int = 8002, openai_port: int | None = None,
    log_file: Path | None = None, start_timeout: Positive = 300.0, notice: NotNegative = 3.0,
) -> None:  # fmt: skip
    """Serve a model repository with Triton until Ctrl-C or SIGTERM.

    It runs the container's tritonserver or the embedded one. Every second each model is asked for an answer, and what has ended
    is started again. HPLM_ADMIN in the environment sets the secret of Triton's restricted APIs. A missing state is begun; with
    HPLM_STATE_MUST_EXIST=1 it is an error.

    :param repository: the model repository to serve
    :param address: address to listen on: 127.0.0.1 is for this machine only, 0.0.0.0 for all networks
    :param http_port: 0: any free port
    :param grpc_port: 0: any free port
    :param metrics_port: 0: any free port
    :param openai_port: also serve the interfaces of OpenAI and others here; 0: any free port (default: no such interface)
    :param log_file: file to append the log to (default: .hplm/serve-HTTP_PORT.log)
    :param start_timeout: seconds in which all models must load
    :param notice: seconds after SIGTERM for which only probes fail, so that routers notice; then requests are refused
    """
    from hplm.server import GatewayProcess, Supervisor, TritonServer

    state = state_of(state)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection takes a file
    log_file = log_file or Path(f".hplm/serve-{http_port}.log")
    with until_stopped(), ExitStack() as ending:
        begin(repository, state, os.environ.get(MUST_EXIST, "").lower() not in ("", "0", "false"))
        server = TritonServer(
            repository, address, http_port, grpc_port, metrics_port, log_file, state, flags, start_timeout=start_timeout
        )
        say(f"tritonserver  {server.installation.binary} ({server.installation.description})")
        say(f"log           {server.log_file}")
        say(f"models        {', '.join(server.models)}: loading")
        # The tenants are read while the server starts, because both take seconds.
        reading = ThreadPoolExecutor(1).submit(open_tenants, server.repository, state)
        gateway = None
        if openai_port is not None:
            gateway = ending.enter_context(GatewayProcess(address, openai_port, say_when))
        ending.enter_context(server)
        if gateway is not None:
            gateway.start(server.grpc_url, log_file)
            ending.callback(gateway.drain)  # while the server drains
        supervisor = Supervisor(server, say_when)  # first: what dies once it is said to be ready is started again
        announce(server, gateway, reading.result())
        try:
            while True:
                supervisor.look()
        except Terminated:
            say_when(f"stopping      probes fail, and requests are refused in {notice:g} s")
            server.leave(notice)
            raise


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a block as Ctrl-C does."""


@contextmanager
def until_stopped() -> Iterator[None]:
    """Lets SIGTERM end the block with `Terminated`, and says that it has ended."""

    def terminate(number: int, frame: object) -> NoReturn:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt:
        say("stopped")


def begin(repository: Path, state: Location | None, must_exist: bool) -> None:
    """Begins the registries that are missing in a folder, or raises if they must exist."""
    if state is None:
        return
    from hplm.location import local_folder
    from hplm.registry.store import Away, Denied
    from hplm.tenants.mirror import starts_from
    from hplm.tenants.registry_writer import registries_of
    from hplm.tenants.state_folder import StateFolder

    for name, registry in registries_of(repository, state).items():
        if must_exist or not isinstance(state, Path):
            try:
                registry.pointer()
            except (Away, Denied) as error:
                copy = StateFolder(local_folder(state) / name)
                if isinstance(state, Path) or copy.pointer() is None:
                    raise
                say(f"state         {error}. {starts_from(copy)}")
        elif registry.begin():
            say(f"state         {registry.store} is new: nothing was changed since the export")


def open_tenants(repository: Path, state: Location | None) -> list[str]:
    """Returns the tenants without keys, which answer everybody."""
    if not any(repository.glob("*/1/tenants.json")):
        return []  # a repository without hPLMs has no tenants
    from hplm.tenants.directory import Directory

    snapshots = Directory(repository, state).snapshots()
    return sorted(tenant.id for snapshot in snapshots for tenant in snapshot.tenants if not tenant.keys)


def announce(server, gateway, without_keys: list[str]) -> None:
    say(f"HTTP          {server.http_url}")
    say(f"gRPC          {server.grpc_url}")
    say(f"metrics       {server.metrics_url}/metrics")
    if gateway is not None:
        say(f"gateway       {gateway.url}")
    if without_keys:
        names = ", ".join(without_keys[:NAMED]) + (", ..." if len(without_keys) > NAMED else "")
        say(f"open          tenants without a key, which answer everybody: {len(without_keys)} ({names})")
    if server.address.startswith("127."):
        say("Ready, for this machine only (loopback); --address 0.0.0.0 lets others in. Ctrl-C or SIGTERM stops it.")
    else:
        say(f"Ready, for everyone who reaches {server.address}. Ctrl-C or SIGTERM stops it.")


def say_when(line: str) -> None:
    say(f"{time.strftime('%F %T%z')} {line}")


def say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
