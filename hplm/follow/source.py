"""The source of a copy: files of live states over HTTP, and the reports that it takes. One connection stays open.

Every request is a plain GET or PUT without conditions. An ETag is made of a second and a length, which two generations share.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from urllib.parse import quote, urlsplit

from hplm.errors import Broken, HplmError, InvalidInput

TIMEOUT = 5.0  # seconds without a byte
BLOCK = 1 << 18  # the most bytes that are read at once


class Away(HplmError):
    """The source does not answer. It may soon."""


class Absent(HplmError):
    """The source does not have a file, or not so much of it. It may have a newer generation, which does not need the file."""


class Source:
    """Used by one thread at a time."""

    def __init__(self, address: str, token: str = "") -> None:
        parts = urlsplit(address)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise InvalidInput(f"{address!r} is not the address of a source: give one such as http://10.0.0.1:8090")
        if parts.username is not None or parts.password is not None:
            raise InvalidInput(
                "the address of the source has a user name or a password: put the token into a file for --token-file"
            )
        if not token.isprintable() or not token.isascii():
            raise InvalidInput("the token of the source is not one line of ASCII: name the file that nginx was given")
        self.address = address.rstrip("/")
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        if parts.scheme == "https":
            context = ssl.create_default_context()
            self._connection = http.client.HTTPSConnection(parts.hostname, port, timeout=TIMEOUT, context=context)
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, port, timeout=TIMEOUT)

    def current(self, backbone: str) -> int | None:
        """Returns the newest generation of a backbone. 0: nothing was changed yet; None: there is no state."""
        path = f"{backbone}/CURRENT"
        try:
            said = self.read(path)
        except Absent:
            return None
        if not said.strip().isdigit():
            raise Broken(f"{self.address}/{path} does not contain the number of a generation: give the address of a source")
        return int(said)

    def read(self, path: str, start: int = 0, size: int | None = None) -> bytes:
        """Returns a whole file, or `size` bytes of it from `start` on."""
        blocks = b"".join(self.stream(path, start, size))
        if size is not None and len(blocks) != size:
            raise Absent(f"{self.address}/{path} ends before byte {start + size}")
        return blocks

    def stream(self, path: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        """Yields a file from `start` on, as it arrives. Nothing else may be asked meanwhile, unless the iterator is closed."""
        whole = start == 0 and size is None
        end = start + size - 1 if size is not None else ""
        answer = self._ask("GET", path, {} if whole else {"Range": f"bytes={start}-{end}"})
        done = False
        try:
            if answer.status in (404, 416):
                answer.read()
                done = True
                raise Absent(f"{self.address}/{path} is missing there, or too short")
            if answer.status != (200 if whole else 206):
                raise self._refusal(answer.status, path)
            yield from self._blocks(answer, path)
            done = True
        except (OSError, http.client.HTTPException) as error:
            raise self._away(error) from None
        finally:
            if not done:
                self._connection.close()  # the rest of the answer is not wanted

    def report(self, path: str, said: str) -> None:
        """Writes a reader's file at the source."""
        answer = self._ask("PUT", path, {}, said.encode())
        try:
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._away(error) from None
        if answer.status not in (200, 201, 204):
            raise self._refusal(answer.status, path)

    def close(self) -> None:
        self._connection.close()

    def _blocks(self, answer: http.client.HTTPResponse, path: str) -> Iterator[bytes]:
        rest = answer.length
        while block := answer.read1(BLOCK):
            rest = rest - len(block) if rest is not None else None
            yield block
        if rest:
            raise Away(f"{self.address} closed the connection before the end of {path}")
        answer.read()

    def _ask(self, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> http.client.HTTPResponse:
        was_open = self._connection.sock is not None
        try:
            self._connection.request(method, f"{self._prefix}/{quote(path)}", body, {**self._headers, **headers})
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if was_open and isinstance(error, ConnectionError):  # a server may close an idle connection at any time
                return self._ask(method, path, headers, body)
            raise self._away(error) from None

    def _away(self, error: Exception) -> Away:
        self._connection.close()
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        return Away(f"{self.address} does not answer ({reason})")

    def _refusal(self, status: int, path: str) -> HplmError:
        """Returns the error for an answer of another status than it has to have. Its rest is not read."""
        self._connection.close()
        url = f"{self.address}/{path}"
        if status in (401, 403):
            return InvalidInput(f"{url} is refused ({status}): name the file with the token of the source with --token-file")
        if status == 200:
            return InvalidInput(
                f"{self.address} sends whole files where a part was asked for: serve it with deploy/nginx/source.conf"
            )
        if status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED:
            return Away(f"{url} answers with status {status}: see the log of its server")
        return InvalidInput(f"{url} answers with status {status}: give the address of a source with --from")
