"""The errors that a user meets. Each says what is wrong and what to do.

Clients read `word`. `status` is the name of the Triton error code that is sent with it.
"""

from __future__ import annotations

import errno
import logging
import re
import traceback
from collections.abc import Sequence

log = logging.getLogger(__name__)
# Code that reads a file of ours raises these if the file's JSON has another form.
MISFITS = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
LONGEST_QUOTING = 900  # bytes of a message that quotes what was given
RESEND = "hplm-resend"  # header of a proxy that sends what is refused as draining to another server, which it knows by 501
_FULL = (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)  # reasons of the operating system


class HplmError(Exception):
    """An error that the user can act on. The command line prints it without a traceback."""

    word = "internal"
    status = "INTERNAL"

    @classmethod
    def status_for(cls, resends: bool) -> str:
        """`resends`: whether the sender of the request has set RESEND."""
        return cls.status

    def wire(self) -> str:
        """Returns the message as clients of the server see it: the word in brackets, then the sentence."""
        return f"[{self.word}] {shortened(str(self))}".encode(errors="replace").decode()


class InvalidInput(HplmError):
    word = "invalid_input"
    status = "INVALID_ARG"

    def __str__(self) -> str:
        return shortened(super().__str__())


class NoTenant(HplmError):
    """Unknown tenant, wrong key or missing ticket. All share one message, so that a client cannot tell them apart.

    Only the model for management, which has no tenants, says something else.
    """

    word = "no_tenant"
    status = "NOT_FOUND"

    _usual = (
        "no such tenant, or not yours: check the parameter 'tenant', and the header 'authorization', which a proxy may not "
        "forward"
    )

    def __init__(self, message: str = _usual) -> None:
        super().__init__(message)


class QueueFull(HplmError):
    word = "queue_full"
    status = "UNAVAILABLE"


class Quota(HplmError):
    """The tenant's own limit is reached. The request was not run, and the message says when to retry."""

    word = "quota"
    status = "UNAVAILABLE"


class DeadlineMissed(HplmError):
    word = "deadline"
    status = "UNAVAILABLE"

    @classmethod
    def after(cls, arrival_ns: int, deadline_ns: int) -> DeadlineMissed:
        """Returns the error for a request that will not be answered in time."""
        allowed = (deadline_ns - arrival_ns) / 1e6
        return cls(
            f"the request cannot be answered within the {allowed:g} ms that it allowed: allow more time, or send fewer texts"
        )


class Draining(HplmError):
    word = "draining"
    status = "UNAVAILABLE"

    @classmethod
    def status_for(cls, resends: bool) -> str:
        return "UNSUPPORTED" if resends else cls.status  # of no other answer that goes to another server


class OutOfCapacity(HplmError):
    """The server has no memory, shared memory or disk space for it. A smaller request, or the same one later, may pass."""

    word = "capacity"
    status = "UNAVAILABLE"


class Internal(HplmError):
    """A failure of ours. The server's log says where."""


class Broken(HplmError):
    """Stored data that fail their checks. Only requests that need these data fail."""

    word = "broken"

    def __str__(self) -> str:
        return shortened(super().__str__())


class Crashed(HplmError):
    """The engine ended while it computed the request, which may be the cause. Clients do not send it again by themselves."""

    word = "crashed"


class Quarantined(HplmError):
    """The tenant's requests have ended the engine twice. Nothing of it is computed for a while."""

    word = "quarantined"
    status = "UNAVAILABLE"


BY_WORD = {error.word: error for error in HplmError.__subclasses__()}  # those of this file


def shortened(message: str) -> str:
    """Leaves out the middle of a long message. Its beginning names the thing, and its end says what to do."""
    encoded = message.encode("utf-8", "backslashreplace")
    if len(encoded) <= LONGEST_QUOTING:
        return message
    half = LONGEST_QUOTING // 2
    return f"{encoded[:half].decode('utf-8', 'ignore')} ... {encoded[-half:].decode('utf-8', 'ignore')}"


def some(names: Sequence[object], most: int = 5) -> str:
    """Names the first ones, and says how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(map(str, names[:most]))}{more}"


def error_in(message: str) -> type[HplmError] | None:
    """Returns the error class whose word is in a message from the wire. Triton puts its own words before ours."""
    return next((BY_WORD[word] for word in re.findall(r"\[(\w+)\]", message) if word in BY_WORD), None)


def word_of(error: Exception) -> str:
    """Returns the word by which an error is counted."""
    return for_client(error, "it").word


def for_client(error: Exception, doing: str) -> HplmError:
    """Returns the error that a client gets for any exception. `doing` names what failed.

    The client gets our own errors as they are. Of others it learns only the kind, because their messages may hold secrets.
    """
    if isinstance(error, HplmError):
        return error
    is_full = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _FULL)
    kind = OutOfCapacity if is_full else Internal
    return kind(f"{doing} failed ({kind_of(error)}): the server's log says where")


def logged_error(error: Exception, doing: str) -> HplmError:
    """Returns what `for_client` does, and logs where an error was raised that is not ours.

    Its message may hold what the client sent, such as its API key: neither the log nor the client gets it.
    """
    if not isinstance(error, HplmError):
        raised = "".join(traceback.format_tb(error.__traceback__))
        log.error("%s failed: %s, raised in\n%s", doing, kind_of(error), raised)
    return for_client(error, doing)


def kind_of(error: Exception) -> str:
    """Returns the class of an unexpected error, and the operating system's reason, without a message that may hold secrets."""
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__
