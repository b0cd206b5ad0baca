"""What can go wrong, as exceptions: a class for each word of the server's, and one for each way of not reaching it."""

from __future__ import annotations

import re


class HplmClientError(Exception):
    """Base of everything this client raises. `status` is the HTTP status or gRPC code, where there was one."""

    word: str | None = None  # what the server puts in brackets for this error

    def __init__(self, message: str, status: str | None = None) -> None:
        super().__init__(message)
        self.status = status


class SafeToRetry(HplmClientError):
    """The server has not taken the request, and says so, or nothing was sent: sending it again can double no work."""

    @property
    def retry_after_s(self) -> float | None:
        """The server's hint, such as 'retry after 0.2 s' or 'retry after 50 ms', in seconds."""
        hint = re.search(r"retry after (\d+(?:\.\d+)?) ?(ms|s)\b", str(self), re.IGNORECASE)
        return None if hint is None else float(hint[1]) / (1000 if hint[2].lower() == "ms" else 1)


class InvalidInput(HplmClientError):
    """The request itself is wrong; the same request will be refused again."""

    word = "invalid_input"


class NoTenant(HplmClientError):
    """No such tenant, or the key does not open it: the server does not say which."""

    word = "no_tenant"


class QueueFull(SafeToRetry):
    word = "queue_full"


class QuotaExceeded(SafeToRetry):
    word = "quota"


class Draining(SafeToRetry):
    """The server is stopping and takes nothing new; behind a proxy another replica may."""

    word = "draining"


class DeadlineMissed(HplmClientError):
    """The server gave the request up because its deadline had passed."""

    word = "deadline"


class ServerFault(HplmClientError):
    """The server failed on a request that may be perfectly good."""


class Broken(ServerFault):
    """Stored knowledge that this tenant needs does not pass its checks: an operator has to look."""

    word = "broken"


class UnexpectedAnswer(ServerFault):
    """Something answered, but not as an hPLM backbone does: another model, another server, another port."""


class Unavailable(ServerFault):
    """Triton or a proxy in front of it refused without a word of hPLM's; whether work was begun is unknown."""


class Forbidden(HplmClientError):
    """A proxy, or Triton's restriction of its own endpoints, demands other credentials."""


class NoBackbone(HplmClientError):
    """The server has no such backbone, or several where none was named."""


class ConnectionFailed(HplmClientError):
    """Base of the failures of the way to the server."""


class NotConnected(ConnectionFailed, SafeToRetry):
    """No connection came about (refused, unknown host): nothing was sent."""


class ConnectionLost(ConnectionFailed):
    """The connection broke after something was sent: the server may have taken the request."""


class ClientTimeout(ConnectionFailed):
    """Nothing came back in time, the server's own word about the deadline included: it may still be computing."""


BY_WORD: dict[str, type[HplmClientError]] = {
    kind.word: kind
    for kind in (InvalidInput, NoTenant, QueueFull, QuotaExceeded, Draining, DeadlineMissed, Broken)
    if kind.word is not None
}
BY_STATUS: dict[str, type[HplmClientError]] = {
    "400": InvalidInput,
    "401": Forbidden,
    "403": Forbidden,
    "404": NoBackbone,
    "413": InvalidInput,
    "429": Unavailable,
    "502": Unavailable,
    "503": Unavailable,
    "504": Unavailable,
    "StatusCode.INVALID_ARGUMENT": InvalidInput,
    "StatusCode.UNAUTHENTICATED": Forbidden,
    "StatusCode.PERMISSION_DENIED": Forbidden,
    "StatusCode.NOT_FOUND": NoBackbone,
    "StatusCode.UNAVAILABLE": Unavailable,
    "StatusCode.CANCELLED": ConnectionLost,
}
GRPC_RESTRICTED = "This protocol is restricted"  # Triton says so under UNAVAILABLE, where HTTP has 403
# gRPC reports its own failures under the code that servers use as well; only its words tell them apart.
GRPC_NOT_SENT = ("failed to connect to all addresses", "errors resolving ", "DNS resolution failed")
GRPC_CUT_OFF = ("Stream removed", "Socket closed", "Connection reset", "Broken pipe", "GOAWAY", "recvmsg:", "sendmsg:")


def refusal(message: str, status: str | None) -> HplmClientError:
    """The exception for an error answer: by its word if it has one, by its HTTP status or gRPC code if not."""
    for word in re.findall(r"\[(\w+)\]", message):  # Triton puts its own words, brackets among them, before the model's
        if word in BY_WORD:
            return BY_WORD[word](message, status)
    if message.startswith(GRPC_RESTRICTED):
        return Forbidden(message, status)
    if status == "StatusCode.UNAVAILABLE" and message.startswith(GRPC_NOT_SENT):
        return NotConnected(message, status)
    if status == "StatusCode.UNAVAILABLE" and any(words in message for words in GRPC_CUT_OFF):
        return ConnectionLost(message, status)
    return BY_STATUS.get(status or "", ServerFault)(message, status)
