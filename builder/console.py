"""Progress bars on stderr, and the lines that a command writes above them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")
SOON = 2.0  # seconds of silence
VARIABLE = "HPLM_PROGRESS"  # names a file for another program, which gets lines of JSON
_is_silent, _subject = ContextVar("is_silent", default=False), ContextVar("subject", default="")


def tell(**facts: Any) -> None:
    """Appends a line to the file of HPLM_PROGRESS, if there is one."""
    if path := os.environ.get(VARIABLE):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


class Bar(tqdm):  # pyright: ignore[reportMissingTypeArgument] # which only its stubs have
    """Is also told to another program, once a second."""

    _told = 0.0

    def display(self, *given: Any, **options: Any) -> Any:  # whether it was shown, which its stubs do not say
        if (now := time.monotonic()) - self._told >= 1:
            self._told = now
            tell(what=self.desc.removesuffix(": "), done=self.n, of=self.total, unit=self.unit, says=self.postfix)
        return super().display(*given, **options)


def progress_bar(things: Iterable[T] | None = None, title: str = "", **options: Any) -> tqdm[T]:
    """Returns tqdm's bar, which passes these things on. Without a title it is not shown."""
    given: Any = things  # of the types of tqdm, none is that of a bar with or without things
    return Bar(given, _subject.get() + title, disable=_is_silent.get() or not title, **options)


def passing_bar(things: Iterable[T], title: str, **options: Any) -> tqdm[T]:
    """Returns a bar that is shown if its work takes seconds, and goes with its end."""
    return progress_bar(things, title, leave=False, delay=SOON, **options)


def waiting(what: str) -> tqdm[Any]:
    """Says what goes on without steps, until it ends."""
    return progress_bar(title=what, leave=False, bar_format="{desc} ...")


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Shows none for a while: those of work side by side would overwrite each other."""
    before = _is_silent.set(True)
    try:
        yield
    finally:
        _is_silent.reset(before)


@contextmanager
def bars_of(subject: str) -> Iterator[None]:
    """Names for a while what the bars are about."""
    before = _subject.set(f"{subject}: ")
    try:
        yield
    finally:
        _subject.reset(before)


def say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


def say_costs(what: str, seconds: float, size: str, folder: Path) -> None:
    """Says how long a step takes, and its room on the disk of a folder. `size`: in GB."""
    free = shutil.disk_usage(folder).free
    say(f"{what}: takes about {duration(seconds)}, and {size} GB on the disk, which has {free / 1e9:,.2f} GB free")


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"
