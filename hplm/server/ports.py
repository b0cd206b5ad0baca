"""The three ports of a server: given ones are checked to be free, 0 means any free one."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from hplm.errors import HplmError

WILDCARD = "0.0.0.0"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Ports:
    http: int = 0
    grpc: int = 0
    metrics: int = 0

    def items(self) -> tuple[tuple[str, int], ...]:
        """Each port with the flag that sets it: `hplm serve` and tritonserver name them alike."""
        return (("--http-port", self.http), ("--grpc-port", self.grpc), ("--metrics-port", self.metrics))

    def claim(self, address: str) -> Ports:
        """All three as real numbers. Nothing stays bound: whoever starts the server must be ready to lose a race."""
        with ExitStack() as held:  # held until all are chosen, so that they differ
            return Ports(*(_bind(held, address, port, flag) for flag, port in self.items()))


def resolve(address: str) -> str:
    """An IPv4 address. Given a name or an IPv6 address, Triton's HTTP service binds 255.255.255.255 and says nothing."""
    try:
        return socket.gethostbyname(address)
    except OSError as error:
        raise HplmError(
            f"address {address!r} is no IPv4 address or host name of one ({error}): "
            "give --address 127.0.0.1 for this machine only, or 0.0.0.0 for every network it is in"
        ) from error


def reachable(address: str) -> str:
    """Where a client on this machine finds what listens on `address`."""
    return LOOPBACK if address == WILDCARD else address


def _bind(held: ExitStack, address: str, port: int, flag: str) -> int:
    if not 0 <= port <= 65535:
        raise HplmError(f"{flag} {port}: a port is a number from 0 (any free one) to 65535")
    listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    if port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Triton does: old connections do not count
    try:
        listener.bind((address, port))
        listener.listen()  # only now does a second claim of the same port fail
    except OSError as error:
        raise HplmError(_reason(error, address, port, flag)) from error
    return listener.getsockname()[1]


def _reason(error: OSError, address: str, port: int, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return in_use(address, port, flag)
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--address {address}: this machine has no such address; `ip addr` lists those it has"
    if error.errno == errno.EACCES:
        return f"port {port} on {address}: not allowed to listen there; choose one above 1023 with {flag}"
    return f"port {port} on {address}: {error.strerror}; choose another with {flag}"


def in_use(address: str, port: int, flag: str) -> str:
    return (
        f"port {port} on {address} is in use: stop what listens there, or choose another port with {flag} (0 takes a free one)"
    )
