"""The options and the client of commands that send requests to a running server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cyclopts import Parameter

from hplm.errors import HplmError

if TYPE_CHECKING:
    from hplm_client import HplmClient

DEFAULT_URLS = {"http": "127.0.0.1:8000", "grpc": "127.0.0.1:8001"}


@Parameter(name="*", group="Connection")
@dataclass(frozen=True)
class Connection:
    """The options of commands that send requests to a running server."""

    url: str | None = None
    """HOST:PORT of the server (default: 127.0.0.1:8000, for gRPC 127.0.0.1:8001)"""
    protocol: Literal["grpc", "http"] = "http"
    """how to ask it"""
    tls: bool = False
    """connect with TLS, as the front door requires; https:// before the address does the same"""
    ca_file: str | None = None
    """PEM file of the server's certificate, or of the authority that signed it, if the system does not trust it; turns TLS
    on"""
    key: str | None = None
    """API key (default: the variable HPLM_API_KEY, which `ps` does not show)"""

    @contextmanager
    def client(self, backbone: str | None) -> Iterator[HplmClient]:
        """Opens a client. Turns its errors into errors of the command."""
        try:
            from hplm_client import HplmClient, HplmClientError
        except ModuleNotFoundError as error:
            raise HplmError(f"{error}: install our client in the checkout with `.venv/bin/pip install -e clients`") from error
        try:
            url = self.url or DEFAULT_URLS[self.protocol]
            key = self.key or os.environ.get("HPLM_API_KEY") or None  # an empty variable counts as unset
            with HplmClient(url, self.protocol, backbone, key, tls=self.tls, ca_file=self.ca_file) as client:
                yield client
        except HplmClientError as error:
            raise HplmError(str(error)) from error


LOCAL = Connection()
