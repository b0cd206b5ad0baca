"""Checks which things a message names, whatever its sentence is."""

from __future__ import annotations

import re

import pytest


def mentioning(*things: object) -> str:
    """Returns a pattern for `match=`: the message contains each of these as a whole word, number or path, in any order."""
    return r"(?s)\A" + "".join(f"(?=.*{_whole(str(thing))})" for thing in things)


def mentions(message: object, *things: object) -> bool:
    """Whether a message contains each of these. For messages that were printed or sent by a server."""
    return re.search(mentioning(*things), str(message)) is not None


def refusing(kind: type[Exception] | tuple[type[Exception], ...], *things: object) -> pytest.RaisesExc[Exception]:
    """The block must raise such an error, whose message mentions each of these things."""
    return pytest.raises(kind, match=mentioning(*things))


def _whole(thing: str) -> str:
    """Returns a pattern for a whole thing. A number is not part of another number, a path or a name, as 5 in 0.5 or `a-5`."""
    before = after = ""
    if re.match(r"\d", thing):
        before = r"(?<![\w/])(?<!\d[.,])(?<![A-Za-z]-)"
    elif re.match(r"\w", thing):
        before = r"(?<!\w)(?<!\w-)"
    if re.search(r"\d$", thing):
        after = r"(?!\w|[.,]\d)"
    elif re.search(r"\w$", thing):
        after = r"(?!\w|-\w)"
    return before + re.escape(thing) + after
