"""Opens a client for commands that send requests to a running server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hplm.errors import HplmError

if TYPE_CHECKING:
    from hplm_client import HplmClient


@contextmanager
def open_client(args: argparse.Namespace, url: str, backbone: str | None) -> Iterator[HplmClient]:
    """Opens a client with --protocol and --key. Turns errors of the client into errors of the command."""
    try:
        from hplm_client import HplmClient, HplmClientError
    except ModuleNotFoundError as error:
        raise HplmError(f"{error}: install our client in the checkout with `.venv/bin/pip install -e clients`") from error
    try:
        with HplmClient(url, args.protocol, backbone, args.key or os.environ.get("HPLM_API_KEY")) as client:
            yield client
    except HplmClientError as error:
        raise HplmError(str(error)) from error
