"""Loads in processes of their own: all begin together, and one that fails or does not end is told at once."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pytest

from hplm.errors import HplmError
from loadtest.load import send


@dataclass(frozen=True)
class Doing:
    """A load that sends nothing."""

    what: str
    limit_s: float = 0.1

    def run(self) -> tuple[str, int]:
        if self.what == "refuses":
            raise HplmError("no server")
        if self.what == "dies":
            os._exit(3)
        while self.what == "hangs":
            time.sleep(60)
        return self.what, os.getpid()


@pytest.mark.slow
def test_reports_come_in_the_order_of_the_loads_and_one_that_fails_or_does_not_end_ends_the_others() -> None:
    """Processes start one after the other."""
    (first, one), (second, other) = send(Doing("first"), Doing("second"))
    assert (first, second) == ("first", "second") and len({one, other, os.getpid()}) == 3
    failures = ("refuses", 3600, "no server"), ("dies", 3600, "without a report"), ("hangs", 0.1, "not end within")
    for what, start_s, named in failures:
        with pytest.raises(HplmError, match=named):
            send(Doing("hangs"), Doing(what), start_s=start_s)
