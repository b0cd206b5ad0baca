"""Commands to a running cluster, such as `hplm cluster roll`: through a socket in its folder.

A question is the name of a command. The answer is lines of JSON: any number of {"say": ...}, then one {"done": ...} or
{"error": ...}.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hplm.cluster.admin_socket import check_socket_path
from hplm.errors import HplmError

SOCKET = "control.sock"
QUESTION_SECONDS = 5.0
ANSWER_SECONDS = 900.0  # between two lines of an answer

Say = Callable[[str], None]
Command = Callable[[Say], dict[str, Any]]


class Listener:
    """The side of the running cluster. One question is answered at a time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SOCKET
        check_socket_path(self._path, "--folder")
        self._path.unlink(missing_ok=True)  # of a cluster that was killed
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self._path))
        self._path.chmod(0o600)
        self._socket.listen()

    def serve(self, commands: dict[str, Command], seconds: float) -> None:
        """Waits so long for a question, and answers it."""
        self._socket.settimeout(seconds)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return
        with connection:
            connection.settimeout(QUESTION_SECONDS)
            with suppress(OSError):  # whoever asked has gone; what was asked for is done all the same
                _answer(connection, commands)

    def close(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)


def _answer(connection: socket.socket, commands: dict[str, Command]) -> None:
    with connection.makefile("r", encoding="utf-8", errors="replace") as lines:
        question = lines.readline().strip()

    def send(kind: str, content: object) -> None:
        with suppress(OSError):
            connection.sendall(json.dumps({kind: content}).encode() + b"\n")

    if question not in commands:
        send("error", f"this cluster knows no command {question!r}: use the same version of hplm")
        return
    try:
        send("done", commands[question](lambda line: send("say", line)))
    except (HplmError, OSError) as error:
        send("error", str(error))


def ask(folder: Path, question: str, say: Say) -> dict[str, Any]:
    """Asks the cluster that runs in a folder. Returns its answer, and passes on what it says before."""
    path = folder / SOCKET
    check_socket_path(path, "--folder")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(str(path))
        except OSError:
            raise HplmError(f"no cluster runs in {folder}: start one with `hplm cluster up`, or name its --folder") from None
        connection.sendall(f"{question}\n".encode())
        with connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                ((kind, content),) = json.loads(line).items()
                if kind == "done":
                    return content
                if kind == "error":
                    raise HplmError(content)
                say(content)
    raise HplmError(f"the cluster in {folder} ended before it had answered: read what it has printed")
