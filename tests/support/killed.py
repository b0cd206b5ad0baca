"""Kills work at its changes of the disk, and runs it again."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.wait import PATIENCE

TOUCHES = ("replace", "unlink", "rename")  # a file that grew between two of them is discarded, or written again
DEATHS = int(os.environ.get("HPLM_TEST_DEATHS", "6"))  # with 1000 it dies at each change


def deaths_survived(work: Callable[[Path], object], folder: Path) -> int:
    """Kills `work`, which fills a folder, and calls it again. The folder must be as after an undisturbed call.

    It is killed at some renames and removals from first to last.
    Returns how many of these there are in all.
    """
    touches = changes(work, folder / "undisturbed")
    undisturbed = content(folder / "undisturbed")
    spread = {1 + number * (touches - 1) // (DEATHS - 1) for number in range(DEATHS)}
    for touch in sorted({*spread, max(1, touches - 1)}):
        target = folder / f"killed-{touch}"
        killed(work, target, touch)
        work(target)
        assert content(target) == undisturbed, f"killed at change {touch} of {touches}, it ended with other files"
    return touches


def killed(work: Callable[[Path], object], folder: Path, at: int) -> None:
    """Lets a process do `work` until it would make this change."""
    child = multiprocessing.get_context("fork").Process(target=changes, args=(work, folder, at))
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == -signal.SIGKILL, f"it was not killed at change {at}"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changes(work: Callable[[Path], object], folder: Path, last: int | None = None) -> int:
    """Returns how many changes of the disk `work` makes. It kills this process at the `last` one."""
    touches = 0

    def counted(touch: Callable) -> Callable:
        def call(*arguments: object, **options: object) -> object:
            nonlocal touches
            touches += 1
            if touches == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return touch(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in TOUCHES:
            patch.setattr(os, name, counted(getattr(os, name)))
        work(folder)
    return touches
