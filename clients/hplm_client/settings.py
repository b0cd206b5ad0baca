"""What both clients are told when they are made, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import urlsplit

from hplm_client.errors import InvalidInput
from hplm_client.retry import Attempts

Protocol = Literal["http", "grpc"]


@dataclass(frozen=True)
class Settings:
    """`network_timeout` bounds requests that name no deadline, readiness checks and the search for the backbone."""

    url: str
    protocol: Protocol = "http"
    api_key: str | None = field(default=None, repr=False)
    network_timeout: float = 30.0
    retries: int = 2

    def __post_init__(self) -> None:
        if self.protocol not in get_args(Protocol):
            raise InvalidInput(f"protocol {self.protocol!r}: it is one of {', '.join(get_args(Protocol))}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise InvalidInput("the API key cannot go into a header: it holds something other than printable ASCII")
        if not 0 < self.network_timeout < math.inf:
            raise InvalidInput(f"network_timeout {self.network_timeout}: seconds, more than 0, so that nothing hangs")
        if self.retries < 0:
            raise InvalidInput(f"retries {self.retries}: 0 turns them off")
        host_and_port(self.url)

    @property
    def headers(self) -> dict[str, str]:
        """The same for HTTP headers and gRPC metadata, whose keys must be lower-case."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    def attempts(self, deadline_ms: float | None = None) -> Attempts:
        return Attempts(self.retries, deadline_ms, self.network_timeout)


def host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(f"//{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidInput(f"url {url!r}: {error}") from error
    if not host or not port or parts.netloc != url or "@" in url:
        raise InvalidInput(f"url {url!r}: give HOST:PORT, nothing before or after it")
    return host, port
