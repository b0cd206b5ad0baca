"""Makes room for the answers that wait inside Triton for the thread of their HTTP connection.

A model's answer goes to that thread as a message over a pair of Unix sockets. Triton does not look whether the socket took it
(`evthr_defer` in its http_server.cc). The usual buffer has room for 278 messages. The next answers are lost, and their clients
wait for ever. Most connections belong to the first thread, and while it reads requests, answers wait.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from hplm.server.process_group import sockets

log = logging.getLogger(__name__)
ROOM = 8 << 20  # bytes of each buffer: for some 10,000 answers
KERNEL_DEFAULT = 212_992  # bytes
ANSWER = 768  # bytes that a message takes, most of them the kernel's own
_PIDFD_GETFD = 438  # the number of the system call on every architecture
_SNDBUFFORCE = 32  # as SO_SNDBUF, beyond the system's limit; for root


def widen(pid: int) -> None:
    """Widens the buffers of all pairs that a server process has. If the system does not allow that, logs so."""
    try:
        room = min((_widened(copied) for copied in _unix_sockets(pid)), default=ROOM)
    except OSError as error:
        log.warning("cannot widen the buffers of Triton's HTTP threads (%s)", error)
        room = usual()
    if room < ROOM:
        log.warning(
            "Triton may lose answers when more than %d HTTP requests are open: serve through the front door, or give the "
            "command `sysctl -w net.core.wmem_default=%d` before the start",
            room // ANSWER,
            ROOM,
        )


def usual() -> int:
    """Returns the size of a buffer that nobody has widened."""
    try:
        return int(Path("/proc/sys/net/core/wmem_default").read_text())
    except FileNotFoundError:  # older kernels do not show it in a container's network
        return KERNEL_DEFAULT


def _widened(copied: socket.socket) -> int:
    """Widens a socket's buffer. Returns its size."""
    try:
        copied.setsockopt(socket.SOL_SOCKET, _SNDBUFFORCE, ROOM // 2)  # the kernel doubles it
    except PermissionError:
        copied.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM // 2)
    return copied.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _unix_sockets(pid: int) -> Iterator[socket.socket]:
    """Yields copies of a process's Unix sockets: what is set on a copy holds for the socket itself."""
    process = os.pidfd_open(pid)
    try:
        for descriptor in sockets(pid):
            copied = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
            if copied >= 0:
                with socket.socket(fileno=copied) as ours:
                    if ours.family == socket.AF_UNIX:
                        yield ours
            elif ctypes.get_errno() != errno.EBADF:  # otherwise it was closed meanwhile
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(process)
