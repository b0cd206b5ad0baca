"""The client's exceptions: one for each word in the server's errors, and one for each kind of failed connection."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hplm_client.answer import Answer

BY_WORD: dict[str, type[HplmClientError]] = {}


class HplmClientError(Exception):
    """The base of all exceptions of this client. `status` is that of HTTP, also over gRPC; None: no server has answered."""

    word: str | None = None  # the word in brackets in the server's message
    http: int | None = None  # the status that goes with the word

    def __init_subclass__(cls) -> None:
        if cls.word is not None:
            BY_WORD.setdefault(cls.word, cls)  # not a class that somebody derives from it

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class SafeToRetry(HplmClientError):
    """The request was not sent, or the server has refused to take it. Sending it again cannot double any work."""

    @property
    def retry_after_s(self) -> float | None:
        """The seconds in the server's hint, such as 'retry after 0.2 s' or 'retry after 50 ms'."""
        hint = re.search(r"retry after (\d+(?:\.\d+)?) ?(ms|s)\b", str(self), re.IGNORECASE)
        return None if hint is None else float(hint[1]) / (1000 if hint[2].lower() == "ms" else 1)


class InvalidInput(HplmClientError):
    """The request itself is wrong. The same request will be refused again."""

    word, http = "invalid_input", 400


class NoTenant(HplmClientError):
    """There is no such tenant, or the key is wrong. The server does not say which."""

    word, http = "no_tenant", 404


class QueueFull(SafeToRetry):
    word, http = "queue_full", 503


class QuotaExceeded(SafeToRetry):
    word, http = "quota", 503


class Draining(SafeToRetry):
    """The server is stopping and takes no new requests. Behind a proxy, another replica may."""

    word, http = "draining", 503


class DeadlineMissed(HplmClientError):
    """The server refused or dropped the request, because it cannot be answered by its deadline."""

    word, http = "deadline", 503


class LateAnswer(DeadlineMissed):
    """The answer came after the deadline. Only of a client with `late_is_error`. `answers` has what came, one for each text."""

    def __init__(self, message: str, answers: list[Answer]) -> None:
        super().__init__(message)
        self.answers = answers


class ServerFault(HplmClientError):
    """The server failed. The request itself may be valid."""


class OutOfCapacity(ServerFault):
    """The server has no memory for the request or its answer. Work was done: send fewer texts, or the same later."""

    word, http = "capacity", 503


class Internal(ServerFault):
    """The server itself failed. An operator finds the reason in its log."""

    word, http = "internal", 500


class Broken(ServerFault):
    """Stored data of this tenant fail their checks. An operator has to act. Earlier servers sent it for the two above too."""

    word, http = "broken", 500


class Crashed(ServerFault):
    """The server's engine ended while it computed the request, which may be the cause. It is not sent again by itself."""

    word, http = "crashed", 500


class Quarantined(ServerFault):
    """The tenant's requests have ended the server's engine. It is refused for ten minutes or longer."""

    word, http = "quarantined", 503


class UnexpectedAnswer(ServerFault):
    """The answer is not that of an hPLM backbone. It may come from another model, server or port."""


class Unavailable(ServerFault):
    """Triton or a proxy refused the request, without a word of hPLM. It is unknown whether work was started."""


class Forbidden(HplmClientError):
    """A proxy, or one of Triton's restricted endpoints, needs other credentials."""


class NoBackbone(HplmClientError):
    """The server has no such backbone, or it has several and none was named."""


class NotTrusted(HplmClientError):
    """The server's certificate is not trusted, or is for another name. Nothing was sent."""


class ConnectionFailed(HplmClientError):
    """The base of all failures of the connection to the server."""


class NotConnected(ConnectionFailed, SafeToRetry):
    """No connection was made (refused, unknown host). Nothing was sent."""


class ConnectionLost(ConnectionFailed):
    """The connection broke after something was sent. The server may have taken the request."""


class ClientTimeout(ConnectionFailed):
    """No answer came in time, not even the server's error about the deadline. The server may still compute the request."""


GONE = 499  # the call was cancelled
BY_STATUS: dict[int, type[HplmClientError]] = {
    400: InvalidInput,
    401: Forbidden,
    403: Forbidden,
    404: NoBackbone,
    413: InvalidInput,
    429: Unavailable,
    GONE: ConnectionLost,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}
OF_GRPC = {  # the HTTP status for each code of gRPC; for all others: 500
    "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "OUT_OF_RANGE": 400, "UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404, "ABORTED": 409, "ALREADY_EXISTS": 409, "RESOURCE_EXHAUSTED": 429, "CANCELLED": GONE,
    "UNIMPLEMENTED": 501, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip
NOT_SERVED = (404, 501)  # the front door's answers to all but inference and health
GRPC_RESTRICTED = "This protocol is restricted"  # Triton sends it with UNAVAILABLE, but 403 over HTTP
UNKNOWN_MODEL = "Request for unknown model"  # an error within a stream of gRPC has no code
# gRPC reports its own failures with a code that servers use too. Only the text differs.
GRPC_NOT_SENT = ("failed to connect to all addresses", "errors resolving ", "DNS resolution failed")
GRPC_CUT_OFF = ("Stream removed", "Socket closed", "Connection reset", "Broken pipe", "GOAWAY", "recvmsg:", "sendmsg:")

# Triton's words when an encoder was asked to generate or a decoder to infer, and those of the model `hplm` for the latter.
OF_AN_ENCODER = ("expected number of inputs between 1 and 2 ",)
OF_A_DECODER = ("decoupled transaction policy", "send text_input or messages")
OF_VECTORS = ("which answers with EMBEDDING",)


def refusal(message: str, told: str | None) -> HplmClientError:
    """Returns the exception for an error answer: by its word, or without one by what was told with it.

    `told`: the status of HTTP, or gRPC's code such as StatusCode.NOT_FOUND. Errors within a stream have neither.
    """
    code = (told or "").removeprefix("StatusCode.")
    status = int(code) if code.isdecimal() else OF_GRPC.get(code, 500) if code else None
    for word in re.findall(r"\[(\w+)\]", message):  # Triton puts its own text, which may have brackets, before the model's
        if word in BY_WORD:
            kind = BY_WORD[word]
            return kind(message, kind.http if status in (None, 400) else status)  # Triton's `generate` has 400 for all
    if message.startswith(GRPC_RESTRICTED):
        return Forbidden(message, 403)
    if status is None and message.startswith(UNKNOWN_MODEL):
        return NoBackbone(message, 404)
    if code == "UNAVAILABLE" and message.startswith(GRPC_NOT_SENT):
        return NotConnected(message)
    if code in ("UNAVAILABLE", "UNKNOWN") and any(words in message for words in GRPC_CUT_OFF):
        return ConnectionLost(message)
    return BY_STATUS.get(status or 0, ServerFault)(message, status)


@contextmanager
def listing(names: str) -> Iterator[None]:
    """While the server is asked what it has: turns its refusal into the advice to name one."""
    try:
        yield
    except HplmClientError as error:
        if not isinstance(error, Forbidden) and error.status not in NOT_SERVED:
            raise
        raise NoBackbone(f"the server does not list its {names} ({error}): name one with `backbone` (--backbone)") from error


@contextmanager
def advising(signs: tuple[str, ...], advice: str) -> Iterator[None]:
    """Adds the advice to a refusal with one of these signs, which is the caller's fault."""
    try:
        yield
    except HplmClientError as error:
        if not any(sign in str(error) for sign in signs):
            raise
        raise InvalidInput(f"{error}: {advice}", error.status) from error


@contextmanager
def expecting(what: str) -> Iterator[None]:
    """While an answer is read: raises UnexpectedAnswer if it has another form."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UnexpectedAnswer(f"the answer is not {what} ({type(error).__name__}: {error}): is this hPLM's server?") from error
