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
from hplm_client.retry import LONGEST_WAIT_S, Attempts, check_time
from hplm_client.tls import trusting
from hplm_client.wire import check_key

Protocol = Literal["http", "grpc"]
SECURE = "https://"
PRINTABLE = re.compile(r"[!-~]+")  # ASCII without spaces
TENANT_HEADER = "hplm-tenant"  # names the tenant to proxies, which do not read the parameter


@dataclass(frozen=True)
class ClientSettings:
    """`network_timeout` limits requests without a deadline, readiness checks and the search for the backbone."""

    url: str
    protocol: Protocol = "http"
    api_key: str | None = field(default=None, repr=False)
    network_timeout: float = 30.0
    retries: int = 2
    ca_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.protocol not in get_args(Protocol):
            raise InvalidInput(f"unknown protocol {self.protocol!r}: choose one of {', '.join(get_args(Protocol))}")
        check_key(self.api_key)
        check_time("network_timeout", self.network_timeout, "seconds", LONGEST_WAIT_S)
        if not isinstance(self.retries, int) or self.retries < 0:
            raise InvalidInput(f"retries is {self.retries!r}: give a whole number, 0 to turn retries off")
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
        is_secure = self.ca_file is not None or self.url.startswith(SECURE)
        return trusting(self.ca_file) if is_secure else None

    def bearer(self, key: str | None) -> str | None:
        """Returns what authorizes a request. `key`: the request's own, instead of the client's."""
        key = self.api_key if key is None else key
        return None if key is None else f"Bearer {key}"

    def headers(self, parameters: Mapping[str, object] | None = None, key: str | None = None) -> dict[str, str]:
        """The headers for HTTP and the metadata for gRPC, whose keys must be lower-case, of a request with these parameters.

        Without the tenant's if its name cannot be a header's value: no server has such a tenant.
        """
        bearer, tenant = self.bearer(key), (parameters or {}).get("tenant")
        names_tenant = isinstance(tenant, str) and PRINTABLE.fullmatch(tenant)
        return {
            **({} if bearer is None else {"authorization": bearer}),
            **({TENANT_HEADER: str(tenant)} if names_tenant else {}),
        }

    def timed_out(self, seconds: float) -> ClientTimeout:
        advice = "give more time by `deadline_ms` or `network_timeout`, or see whether the server is well"
        return ClientTimeout(f"no answer from {self.url} within {seconds:.3g} s: {advice}")

    def of_another_protocol(self) -> InvalidInput:
        """Returns the error for a port that speaks the other protocol."""
        other = "grpc" if self.protocol == "http" else "http"
        url = "grpc://HOST:PORT" if other == "grpc" else "no grpc://"
        return InvalidInput(
            f"{self.url} does not speak {self.protocol}, but probably {other}: give protocol={other!r} (to a command {url}), "
            f"or the port for {self.protocol} (Triton's default: {8000 if self.protocol == 'http' else 8001})"
        )

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
