"""The settings of both clients, checked when a client is made."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args
from urllib.parse import urlsplit

from hplm_client.errors import ClientTimeout, InvalidInput
from hplm_client.retry import LONGEST_WAIT_S, Attempts
from hplm_client.tls import trusting

Protocol = Literal["http", "grpc"]
SECURE = "https://"
PRINTABLE = re.compile(r"[!-~]+")  # ASCII without spaces
TENANT_HEADER = "hplm-tenant"  # names the tenant to proxies, which do not read the parameter


@dataclass(frozen=True)
class Settings:
    """`network_timeout` limits requests without a deadline, readiness checks and the search for the backbone."""

    url: str
    protocol: Protocol = "http"
    api_key: str | None = field(default=None, repr=False)
    network_timeout: float = 30.0
    retries: int = 2
    tls: bool = False
    ca_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.protocol not in get_args(Protocol):
            raise InvalidInput(f"unknown protocol {self.protocol!r}: choose one of {', '.join(get_args(Protocol))}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise InvalidInput("api_key cannot be sent as a header: give printable ASCII characters only")
        if not 0 < self.network_timeout <= LONGEST_WAIT_S:
            raise InvalidInput(
                f"network_timeout is {self.network_timeout}: give seconds above 0, {LONGEST_WAIT_S:,.0f} at most"
            )
        if self.retries < 0:
            raise InvalidInput(f"retries {self.retries} is below 0: give 0 to turn retries off")
        host_and_port(self.address)
        _ = self.context  # reads `ca_file`

    @property
    def address(self) -> str:
        """HOST:PORT."""
        bare = self.url.removeprefix(SECURE)
        return bare if bare == self.url or re.search(r":\d+$", bare) else f"{bare}:443"

    @cached_property
    def context(self) -> ssl.SSLContext | None:
        """The settings of TLS; None for connections in plain text."""
        is_secure = self.tls or self.ca_file is not None or self.url.startswith(SECURE)
        return trusting(self.ca_file) if is_secure else None

    @property
    def headers(self) -> dict[str, str]:
        """The headers for HTTP and the metadata for gRPC, whose keys must be lower-case."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    def headers_for(self, parameters: Mapping[str, object]) -> dict[str, str]:
        """The headers of a request with these parameters.

        Without the tenant's if its name cannot be a header's value: no server has such a tenant.
        """
        tenant = parameters.get("tenant")
        if not isinstance(tenant, str) or not PRINTABLE.fullmatch(tenant):
            return self.headers
        return self.headers | {TENANT_HEADER: tenant}

    def timed_out(self, seconds: float, status: str | None = None) -> ClientTimeout:
        advice = "give more time by `deadline_ms` or `network_timeout`, or see whether the server is well"
        return ClientTimeout(f"no answer from {self.url} within {seconds:.3g} s: {advice}", status)

    def attempts(self, deadline_ms: float | None = None) -> Attempts:
        return Attempts(self.retries, deadline_ms, self.network_timeout)


def host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(f"//{address}")
    try:
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")
    except ValueError as error:
        raise InvalidInput(f"url {address!r} is invalid ({error}): give HOST:PORT, or https://HOST:PORT for TLS") from error
    if not host or not port or parts.netloc != address or "@" in address:
        raise InvalidInput(f"url {address!r} is invalid: give HOST:PORT, or https://HOST:PORT for TLS, with nothing after it")
    return host, port
