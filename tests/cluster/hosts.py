"""Two machines on one network, as namespaces of Linux, and a switch between them whose cable can be pulled."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

NEAR, FAR = "10.77.0.1", "10.77.0.2"
CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Host:
    def __init__(self, namespace: str, address: str) -> None:
        self.namespace = namespace
        self.address = address

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This thread is on the host. What it starts and opens meanwhile stays there: threads, processes and sockets."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/var/run/netns/{self.namespace}", os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(before)
            os.close(before)
            os.close(there)


class Network:
    def __init__(self, near: Host, far: Host, switch: str) -> None:
        self.near, self.far = near, far
        self._switch = switch

    def cut(self) -> None:
        """Packets are lost from now on, and nobody is told."""
        _ip("-n", self._switch, "link", "set", "far", "nomaster")

    def mend(self) -> None:
        _ip("-n", self._switch, "link", "set", "far", "master", "switch")


@contextmanager
def network() -> Iterator[Network]:
    """Skips the test where this cannot be made."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("namespaces of networks need root and `ip` (Debian, Ubuntu: apt-get install iproute2)")
    name = f"hplm-{secrets.token_hex(4)}"
    near, far, switch = Host(f"{name}-near", NEAR), Host(f"{name}-far", FAR), f"{name}-switch"
    with ExitStack() as ending:
        for namespace in (switch, near.namespace, far.namespace):
            try:
                _ip("netns", "add", namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no namespaces of networks here: {error.stderr.strip()}")
            ending.callback(_ip, "netns", "delete", namespace)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for cable, host in (("near", near), ("far", far)):
            _ip("-n", switch, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("-n", switch, "link", "set", cable, "master", "switch", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", link, "up")
        yield Network(near, far, switch)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
