"""The errors a user meets. Each names the thing and the way out; `word` is what a machine reads."""

from __future__ import annotations

import re


class HplmError(Exception):
    """A condition the user can act on. The command line prints it without a traceback."""

    word = "broken"

    def wire(self) -> str:
        """The message as clients of the server see it: the machine's word in brackets, then the sentence."""
        return f"[{self.word}] {self}"


class InvalidInput(HplmError):
    word = "invalid_input"


class NoTenant(HplmError):
    """Unknown tenant, refused key and missing ticket alike: one text, so that nobody can tell them apart."""

    word = "no_tenant"

    def __init__(self) -> None:
        super().__init__("no such tenant, or not yours: check the 'tenant' parameter and the authorization header")


class QueueFull(HplmError):
    word = "queue_full"


class Quota(HplmError):
    """The tenant's own limit is reached; nothing was done, and the message says when to come again."""

    word = "quota"


class DeadlineMissed(HplmError):
    word = "deadline"


class Draining(HplmError):
    word = "draining"


class Broken(HplmError):
    """Stored knowledge that does not pass its checks: fails those who need it, by name, and no one else."""

    word = "broken"


WORDS = {error.word for error in (InvalidInput, NoTenant, QueueFull, Quota, DeadlineMissed, Draining, Broken)}


def word_of(message: str) -> str | None:
    """The machine's word in a message that came over the wire; Triton puts words of its own before ours."""
    return next((word for word in re.findall(r"\[(\w+)\]", message) if word in WORDS), None)
