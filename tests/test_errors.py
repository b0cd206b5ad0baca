"""Messages that quote what a client sent stay short, and still name the thing and the way out."""

import errno

import pytest

from hplm.errors import Broken, HplmError, Internal, InvalidInput, OutOfCapacity, error_in, for_client, word_of
from tests.support.message import mentions


@pytest.mark.parametrize("quoted", ["x" * 10**6, "水" * 10**5, "\ud800" * 10**5])
@pytest.mark.parametrize("kind", [HplmError, InvalidInput, Broken])
def test_a_message_on_the_wire_has_at_most_a_kilobyte(kind, quoted):
    error = kind(f"parameter 'top_k' is {quoted}: send a whole number")
    message = error.wire()
    assert len(message.encode()) <= 1024 and mentions(message, f"[{error.word}]", "'top_k'", "send a whole number")


def test_an_error_about_input_is_as_short_on_the_command_line():
    assert len(str(InvalidInput("x" * 10**6))) <= 1024
    assert len(str(HplmError("x" * 10**6))) == 10**6  # it may hold the end of a log


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("Bearer hplm_secret"), Internal),
        (PermissionError(errno.EACCES, "Permission denied", "hplm_secret"), Internal),
        (OSError(errno.ENOSPC, "No space left on device", "hplm_secret"), OutOfCapacity),
        (MemoryError("hplm_secret"), OutOfCapacity),
    ],
)
def test_an_unexpected_error_has_the_word_of_its_kind_and_shows_no_message(error, kind):
    said = for_client(error, "reading")
    assert type(said) is kind and word_of(error) == kind.word and error_in(said.wire()) is kind
    assert mentions(said, "reading", type(error).__name__) and "hplm_secret" not in str(said)


def test_an_error_of_ours_reaches_the_client_as_it_is():
    error = Broken("row 7")
    assert for_client(error, "reading") is error
