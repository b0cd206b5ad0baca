"""What a message must name, whatever sentence it stands in."""

from __future__ import annotations

import re


def naming(*things: object) -> str:
    """A pattern for `match=`: the message holds each of these as a whole word, number or path, in any order."""
    return r"(?s)\A" + "".join(f"(?=.*{_whole(str(thing))})" for thing in things)


def names(message: object, *things: object) -> bool:
    """Whether a message that was printed, or came over the wire, holds each of these."""
    return re.search(naming(*things), str(message)) is not None


def _whole(thing: str) -> str:
    """A number is not a part of another one, nor of the path or name that it stands in: 5 is neither in 0.5 nor in `a-5`."""
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
