"""Turns tokens into text while they come. Text is held back until characters are whole and no stop string can begin in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]  # token ids -> text, without special tokens

BROKEN = "\ufffd"  # what a decoder gives for bytes that are no whole character
MOST_HELD = 16  # tokens that are held back for a character: none has more bytes


class Detokenizer:
    """Holds back the part of an answer that may not be said yet. The answer ends before its first stop string.

    A token's text depends on the tokens before it: a decoder may drop a first space, or join bytes. So the tokens that were
    turned into text last are decoded again with the new ones, and the difference is new.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """`before`: the last tokens of the prompt. Those that begin within a character would break the ones behind it."""
        self._decode = decode
        whole = (before[at:] for at in range(len(before)) if BROKEN not in decode(before[at:]))
        self._ids = list(next(whole, before))  # the tokens of the last text, then those that are no whole character yet
        self._known = len(self._ids)  # how many of them are in the last text
        self._text = decode(self._ids) if before else ""  # of these
        self._stops = stops
        self._held = ""  # it may become a stop string
        self.stopped = False

    def add(self, ids: Sequence[int], may_stop: bool = True) -> str:
        """Returns the text that may be said now. Sets `stopped` if a stop string was found."""
        return self._released(self._decoded(ids), may_stop)

    def end(self) -> str:
        """Returns the rest. No token may follow."""
        rest = self._released(self._decoded((), at_end=True), may_stop=True)
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        return rest

    def _decoded(self, ids: Sequence[int], at_end: bool = False) -> str:
        """Returns the new text of whole characters. `at_end`: nothing follows, so no token is held back."""
        self._ids += ids
        held = len(self._ids) - self._known
        new = self._decode(self._ids)[len(self._text) :] if held else ""
        if not at_end and held < MOST_HELD and (not new or new.endswith(BROKEN)):
            return ""
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        self._text = self._decode(self._ids)
        return new

    def _released(self, new: str, may_stop: bool) -> str:
        if self.stopped:
            return ""
        text, self._held = self._held + new, ""
        if not (self._stops and may_stop):
            return text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = max(map(self._begun, [text] * len(self._stops), self._stops))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    @staticmethod
    def _begun(text: str, stop: str) -> int:
        """Returns how many characters at the end of the text begin the stop string."""
        return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
