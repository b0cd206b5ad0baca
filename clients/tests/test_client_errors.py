"""Error answers as exceptions, without a server."""

from __future__ import annotations

import pytest

import hplm_client
from hplm_client import errors
from hplm_client.errors import refusal


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("invalid_input", hplm_client.InvalidInput),
        ("no_tenant", hplm_client.NoTenant),
        ("queue_full", hplm_client.QueueFull),
        ("quota", hplm_client.QuotaExceeded),
        ("deadline", hplm_client.DeadlineMissed),
        ("draining", hplm_client.Draining),
        ("capacity", hplm_client.OutOfCapacity),
        ("internal", hplm_client.Internal),
        ("broken", hplm_client.Broken),
    ],
)
@pytest.mark.parametrize("frame", ["[{}] words", "in ensemble 'minilm', [{}] words", "[request id: 7] [{}] words [quota]"])
def test_the_error_word_chooses_the_exception(word, kind, frame):
    for status in ("503", "StatusCode.UNAVAILABLE", "400", None):
        error = refusal(frame.format(word), status)
        assert type(error) is kind and error.word == word and error.status == status
        assert str(error) == frame.format(word)


@pytest.mark.parametrize(
    ("message", "status", "kind"),
    [
        ("input 'TEXT' data-type is 'FP32'", "400", "InvalidInput"),
        ("too large", "413", "InvalidInput"),
        ("batch-size must be <= 1024", "StatusCode.INVALID_ARGUMENT", "InvalidInput"),
        ("Request for unknown model: 'x' is not found", "404", "NoBackbone"),
        ("Request for unknown model: 'x' is not found", "StatusCode.NOT_FOUND", "NoBackbone"),
        ("who are you", "401", "Forbidden"),
        ("no", "StatusCode.PERMISSION_DENIED", "Forbidden"),
        ("This API is restricted, expecting header 'x'", "403", "Forbidden"),
        ("This protocol is restricted, expecting header 'x'", "StatusCode.UNAVAILABLE", "Forbidden"),
        ("Exceeds maximum queue size", "503", "Unavailable"),
        ("bad gateway", "502", "Unavailable"),
        ("[another_word] yet unknown", "503", "Unavailable"),
        ("Server is stopping", "StatusCode.UNAVAILABLE", "Unavailable"),
        ("Stub process 'x' is not healthy", "500", "ServerFault"),
        ("Stub process 'x' is not healthy", "StatusCode.INTERNAL", "ServerFault"),
        ("no status at all", None, "ServerFault"),
        ("failed to connect to all addresses; last error: ...", "StatusCode.UNAVAILABLE", "NotConnected"),
        ("errors resolving nosuch.invalid:1: [...]", "StatusCode.UNAVAILABLE", "NotConnected"),
        ("Stream removed (Socket closed)", "StatusCode.UNAVAILABLE", "ConnectionLost"),
        ("Channel closed!", "StatusCode.CANCELLED", "ConnectionLost"),
    ],
)
def test_without_an_error_word_the_status_chooses_the_exception(message, status, kind):
    assert type(refusal(message, status)) is getattr(hplm_client, kind)


def test_only_requests_that_were_not_accepted_are_safe_to_retry():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    safe = {kind.__name__ for kind in kinds if issubclass(kind, hplm_client.SafeToRetry)}
    assert safe == {"SafeToRetry", "QueueFull", "QuotaExceeded", "Draining", "NotConnected"}
    assert all(issubclass(kind, hplm_client.HplmClientError) for kind in kinds)


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        ("[quota] retry after 0.2 s", 0.2),
        ("[queue_full] 4,096 texts wait; Retry after 50ms.", 0.05),
        ("[queue_full] retry after 3 s, or add a replica", 3.0),
        ("[queue_full] try later", None),
        ("[queue_full] retry after 5 minutes", None),
    ],
)
def test_retry_hints_are_read(message, seconds):
    assert refusal(message, "503").retry_after_s == seconds
