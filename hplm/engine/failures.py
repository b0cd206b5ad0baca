"""Errors that texts get for an answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hplm.engine.request import Text
from hplm.errors import Draining, HplmError, OutOfCapacity, QueueFull, for_client
from hplm.model import faults

log = logging.getLogger(__name__)


def full(text: Text) -> QueueFull:
    return QueueFull(
        f"the queue is full, and tenant {text.request.tenant.id!r} holds the largest part of it: retry after 0.1 s, or send "
        "fewer texts in a request"
    )


def drained(text: Text) -> Draining:
    return Draining("the server is shutting down: send the request again")


def no_memory(texts: Sequence[Text]) -> OutOfCapacity:
    return OutOfCapacity(
        f"the device has no memory for a batch of {len(texts)} texts with {sum(text.tokens for text in texts)} tokens: "
        "give it fewer with the parameter batch_tokens, or fewer slots"
    )


def failure(what: str, error: Exception) -> HplmError:
    """Logs why a batch, or a text of it, failed. Returns the error that clients get."""
    log.error("%s a batch failed", what, exc_info=error)
    said = for_client(error, f"{what} the batch")
    return OutOfCapacity(str(said)) if faults.is_out_of_memory(error) else said  # torch's own are no MemoryError
