"""The options and the client of commands that send requests to a running server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hplm.errors import HplmError

if TYPE_CHECKING:
    from hplm_client import HplmClient

DEFAULT_URLS = {"http": "127.0.0.1:8000", "grpc": "127.0.0.1:8001"}


def connection_options(command: argparse.ArgumentParser, url_help: str, only_with_url: bool = False) -> None:
    """Adds --url and all options of the connection."""
    start = "for --url: " if only_with_url else ""
    command.add_argument("--url", metavar="HOST:PORT", help=url_help)
    command.add_argument(
        "--protocol", choices=sorted(DEFAULT_URLS), default="http", help=f"{start}how to ask it (default: %(default)s)"
    )
    command.add_argument(
        "--tls",
        action="store_true",
        help=f"{start}connect with TLS, as the front door requires; https:// before the address does the same",
    )
    command.add_argument(
        "--ca-file",
        metavar="FILE",
        help=f"{start}PEM file of the server's certificate, or of the authority that signed it, if the system does not trust "
        "it; turns TLS on",
    )
    command.add_argument(
        "--key", metavar="KEY", help=f"{start}API key (default: the variable HPLM_API_KEY, which `ps` does not show)"
    )


@contextmanager
def open_client(args: argparse.Namespace, backbone: str | None) -> Iterator[HplmClient]:
    """Opens a client with the options of the connection. Turns errors of the client into errors of the command."""
    try:
        from hplm_client import HplmClient, HplmClientError
    except ModuleNotFoundError as error:
        raise HplmError(f"{error}: install our client in the checkout with `.venv/bin/pip install -e clients`") from error
    try:
        url = args.url or DEFAULT_URLS[args.protocol]
        key = args.key or os.environ.get("HPLM_API_KEY") or None  # an empty variable counts as unset
        with HplmClient(url, args.protocol, backbone, key, tls=args.tls, ca_file=args.ca_file) as client:
            yield client
    except HplmClientError as error:
        raise HplmError(str(error)) from error
