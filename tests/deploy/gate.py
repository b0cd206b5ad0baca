"""A gate between the front door and a server: while it is closed, what the door passes on does not arrive."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from loadtest.door import HOST


class Gate:
    def __init__(self, url: str) -> None:
        host, _, port = url.rpartition(":")
        self._server = host, int(port)
        self._is_open = threading.Event()
        self.open()
        self._listening = socket.create_server((HOST, 0))
        self.url = f"{HOST}:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def open(self) -> None:
        self._is_open.set()

    def shut(self) -> None:
        self._is_open.clear()

    def close(self) -> None:
        self.open()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._server)
                threading.Thread(target=self._pass_on, args=(client, server, self._is_open.wait), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, lambda: None), daemon=True).start()

    def _pass_on(self, sender: socket.socket, receiver: socket.socket, wait: Callable[[], object]) -> None:
        with suppress(OSError):
            while piece := sender.recv(1 << 16):
                wait()
                receiver.sendall(piece)
        for end in (sender, receiver):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def gate_before(url: str) -> Iterator[Gate]:
    gate = Gate(url)
    try:
        yield gate
    finally:
        gate.close()
