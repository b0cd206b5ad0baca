"""The errors that a user meets. Each names the thing and the way out.

A machine reads `word`; `status` is the name of the code that Triton sends with it.
"""

from __future__ import annotations

import re


class HplmError(Exception):
    """A condition the user can act on. The command line prints it without a traceback."""

    word = "broken"
    status = "INTERNAL"

    def wire(self) -> str:
        """The message as clients of the server see it: the machine's word in brackets, then the sentence."""
        return f"[{self.word}] {self}"


class InvalidInput(HplmError):
    word = "invalid_input"
    status = "INVALID_ARG"


class NoTenant(HplmError):
    """Unknown tenant, refused key and missing ticket alike: one text, so that nobody can tell them apart."""

    word = "no_tenant"
    status = "NOT_FOUND"

    def __init__(self) -> None:
        super().__init__("no such tenant, or not yours: check the 'tenant' parameter and the authorization header")


class QueueFull(HplmError):
    word = "queue_full"
    status = "UNAVAILABLE"


class Quota(HplmError):
    """The tenant's own limit is reached; nothing was done, and the message says when to come again."""

    word = "quota"
    status = "UNAVAILABLE"


class DeadlineMissed(HplmError):
    word = "deadline"
    status = "UNAVAILABLE"


class Draining(HplmError):
    word = "draining"
    status = "UNAVAILABLE"


class Broken(HplmError):
    """Stored knowledge that does not pass its checks: fails those who need it, by name, and no one else."""

    word = "broken"


BY_WORD: dict[str, type[HplmError]] = {
    error.word: error for error in (InvalidInput, NoTenant, QueueFull, Quota, DeadlineMissed, Draining, Broken)
}


def error_in(message: str) -> type[HplmError] | None:
    """The error whose word is in a message that came over the wire; Triton puts words of its own before ours."""
    return next((BY_WORD[word] for word in re.findall(r"\[(\w+)\]", message) if word in BY_WORD), None)
