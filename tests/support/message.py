"""Checks which things a message names, whatever its sentence is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


def mentioning(*things: object) -> str:
    """Returns a pattern for `match=`: the message contains each of these as a whole word, number or path, in any order."""
    return r"(?s)\A" + "".join(f"(?=.*{_whole(str(thing))})" for thing in things)


def mentions(message: object, *things: object) -> bool:
    """Whether a message contains each of these. For messages that were printed or sent by a server."""
    return re.search(mentioning(*things), str(message)) is not None


@contextmanager
def refusing(kind: type[Exception] | tuple[type[Exception], ...], *things: object) -> Iterator[list[Exception]]:
    """The block must raise such an error, whose message mentions each of these things. Yields a list that will have it.

    A test that fails by it says in its first line what is not named, which `pytest.raises(match=...)` does not.
    """
    raised: list[Exception] = []
    try:
        yield raised
    except kind as error:
        missing = [str(thing) for thing in things if not mentions(error, thing)]
        assert not missing, f"{type(error).__name__} does not mention {missing}: {error}"
        raised.append(error)
        return
    named = ", ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
    raise AssertionError(f"nothing was refused: no {named} that mentions {[str(thing) for thing in things]}")


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
