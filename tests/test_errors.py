"""Messages that quote what a client sent stay short, and still name the thing and the way out."""

import pytest

from hplm.errors import Broken, HplmError, InvalidInput
from tests.naming import names


@pytest.mark.parametrize("quoted", ["x" * 10**6, "水" * 10**5, "\ud800" * 10**5])
@pytest.mark.parametrize("kind", [HplmError, InvalidInput, Broken])
def test_a_message_on_the_wire_has_at_most_a_kilobyte(kind, quoted):
    error = kind(f"parameter 'top_k' is {quoted}: send a whole number")
    message = error.wire()
    assert len(message.encode()) <= 1024 and names(message, f"[{error.word}]", "'top_k'", "send a whole number")


def test_an_error_about_input_is_as_short_on_the_command_line():
    assert len(str(InvalidInput("x" * 10**6))) <= 1024
    assert len(str(HplmError("x" * 10**6))) == 10**6  # it may hold the end of a log
