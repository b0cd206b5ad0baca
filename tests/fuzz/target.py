"""A target of fuzzing: where its cases come from, and what must hold for each of them."""

from __future__ import annotations

import signal
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import hypothesis
from hypothesis import HealthCheck, Phase, given
from hypothesis.strategies import SearchStrategy

from hplm.errors import Broken, HplmError, Internal

LONGEST_MESSAGE = 1024  # bytes
PATIENCE = 30  # seconds for a case


class Found(AssertionError):
    """A case broke something."""


class Target(ABC):
    """Made once for all its cases. What it holds is released by `close`."""

    kept: ClassVar[Sequence[Any]] = ()  # cases that once broke something: they come first
    weight: ClassVar[float] = 1.0  # its share of the cases, less if a case takes long

    @abstractmethod
    def __init__(self, folder: Path) -> None:
        """`folder`: an empty one of its own."""

    @abstractmethod
    def cases(self) -> SearchStrategy[Any]: ...

    @abstractmethod
    def check(self, case: Any) -> None:
        """Raises Found, or anything else that is not an error for users."""

    def close(self) -> None:
        return


def accepts(read: Callable[[], object], where: Path, broken: bool = False) -> None:
    """Runs what reads bad input: it may work, or fail with an error for users. Its message must not be longer than 1 KB.

    `broken`: the input is a file that we wrote, so that an error may say that it is broken.
    """
    try:
        read()
    except HplmError as error:
        message = str(error).replace(str(where), "")
        if len(message.encode("utf-8", "surrogatepass")) > LONGEST_MESSAGE:
            raise Found(f"a message of {len(message):,} characters: {message[:100]!r}") from error
        if isinstance(error, (Broken, Internal)) and not broken:
            raise Found(f"bad input is called broken: {error}") from error


@dataclass
class Result:
    """The number of checked cases, and the simplest of those that broke something."""

    cases: int = 0
    failure: str = ""
    case: Any = None


def run(target: Target, cases: int, seed: int) -> Result:
    """Checks so many cases, the kept ones first, until one breaks something."""
    result = Result()

    def check(case: Any) -> None:
        result.cases += 1
        try:
            with _limited():
                target.check(case)
        except Exception as error:
            result.failure = "".join(traceback.format_exception(error, limit=-4))
            result.case = case
            raise

    random = hypothesis.seed(seed)(
        hypothesis.settings(
            max_examples=max(1, cases - len(target.kept)),
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )(given(case=target.cases())(check))
    )
    try:
        for case in target.kept:
            check(case)
        random()
    except Exception:
        if not result.failure:
            raise
    return result


@contextmanager
def _limited() -> Iterator[None]:
    """Raises Found if a case hangs."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Found(f"no answer after {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
