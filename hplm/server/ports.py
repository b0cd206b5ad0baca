"""The three ports of a server. Given ports are checked to be free; 0 means any free port."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from hplm.errors import HplmError
from hplm.server.process_group import sockets

WILDCARD = "0.0.0.0"
LOOPBACK = "127.0.0.1"
LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LISTENING = "0A"  # in the kernel's tables of sockets
FIRST_FREE = 20_000  # below are those of well-known services


@dataclass(frozen=True)
class Ports:
    http: int = 0
    grpc: int = 0
    metrics: int = 0

    def items(self) -> tuple[tuple[str, int], ...]:
        """Returns each port with the flag that sets it. `hplm serve` and tritonserver use the same names."""
        return (("--http-port", self.http), ("--grpc-port", self.grpc), ("--metrics-port", self.metrics))

    def claim(self, address: str) -> Ports:
        """Returns three free ports. They do not stay bound, so another process may take one before the server starts."""
        for (flag, port), (other, same) in combinations(self.items(), 2):
            if port and port == same:
                raise HplmError(f"{flag} and {other} are both {port}: give different ports (0 takes a free one)")
        with ExitStack() as held:  # bound until all are chosen, so that they differ
            listeners = [held.enter_context(listen(address, port, flag)) for flag, port in self.items()]
            return Ports(*(listener.getsockname()[1] for listener in listeners))


def free_ports(count: int, local_ports: Path = LOCAL_PORTS) -> list[int]:
    """Returns so many free ports of the loopback address, which differ.

    They do not stay bound. Linux gives them to no client and to nobody who asks for any port, as far as there are such ports.
    `local_ports`: the file with the ports that it does give.
    """
    lowest, highest = map(int, local_ports.read_text("ascii").split())
    unused = [port for port in range(FIRST_FREE, 65536) if not lowest <= port <= highest]
    found: list[int] = []
    with ExitStack() as held:
        for port in (*random.SystemRandom().sample(unused, len(unused)), *[0] * count):
            if len(found) == count:
                break
            with suppress(HplmError):  # somebody listens there
                found.append(held.enter_context(listen(LOOPBACK, port, "")).getsockname()[1])
    if len(found) < count:
        raise HplmError(f"{LOOPBACK} has no {count} free ports: stop processes that listen there")
    return found


def listens(port: int) -> bool:
    """Whether somebody listens at this port of the loopback address."""
    with socket.socket() as connection:
        return connection.connect_ex((LOOPBACK, port)) == 0


def listens_at(pid: int, ports: Iterable[int]) -> bool:
    """Whether a process listens at these ports itself. Where the system does not show its sockets: whether anybody does."""
    try:
        own = set(sockets(pid).values())
    except FileNotFoundError:  # it has ended
        return False
    except PermissionError:
        own = None
    found: set[int] = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # no IPv6, or it has ended
            for line in Path(f"/proc/{pid}/net/{table}").read_text("ascii").splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == LISTENING and (own is None or f"socket:[{inode}]" in own):
                    found.add(int(local.rpartition(":")[2], 16))
    return found.issuperset(ports)


def resolve(address: str) -> str:
    """Returns an IPv4 address. Given a name or an IPv6 address, Triton's HTTP service silently binds 255.255.255.255."""
    try:
        return socket.gethostbyname(address)
    except OSError as error:
        raise HplmError(
            f"address {address!r} is not an IPv4 address, or a host name with one ({error}): "
            "give --address 127.0.0.1 for this machine only, or 0.0.0.0 for all its networks"
        ) from error


def reachable(address: str) -> str:
    """Returns the address at which a client on this machine reaches a server that listens on `address`."""
    return LOOPBACK if address == WILDCARD else address


def listen(address: str, port: int, flag: str) -> socket.socket:
    """Returns a socket that listens on a port. `flag`: the option that sets it. Port 0 means any free port."""
    if not 0 <= port <= 65535:
        raise HplmError(f"{flag} {port} is not a port: give a number from 0 (any free port) to 65535")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio delays answers
    if port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Triton does: old connections do not block it
    try:
        listener.bind((address, port))
        listener.listen()  # without it, a second claim of the same port would succeed
    except OSError as error:
        listener.close()
        reasons = {
            errno.EADDRINUSE: in_use(address, port, flag),
            errno.EADDRNOTAVAIL: f"--address {address} is not an address of this machine: choose one that `ip addr` lists",
            errno.EACCES: f"this user may not listen on port {port} of {address}: choose a port above 1023 with {flag}",
        }
        other = f"cannot listen on port {port} of {address} ({error.strerror}): choose another port with {flag}"
        raise HplmError(reasons.get(error.errno or 0, other)) from error
    return listener


def in_use(address: str, port: int, flag: str) -> str:
    return (
        f"port {port} on {address} is in use: stop the process that listens there, or choose another port with {flag} "
        "(0 takes a free one)"
    )
