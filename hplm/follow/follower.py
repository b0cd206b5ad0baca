"""Follows a source: looks for new generations of every backbone, and reports what is served here."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hplm.errors import HplmError, InvalidInput
from hplm.follow.copy import Copy, Foreign
from hplm.follow.source import Away, Source
from hplm.follow.troubles import SOON
from hplm.tenants.followed import Reached
from hplm.tenants.state import EXPORTED_TENANTS, SECONDS_BETWEEN_LOOKS

SECONDS_BETWEEN_REPORTS = 1.0  # while nothing new is taken
TICK = 0.05  # seconds between looks at the readers here
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def usual_name(state: Path) -> str:
    """Returns a name that no other copy has, and that stays the same: of this machine and of the copy's place on it."""
    return f"{socket.gethostname()}-{hashlib.sha256(str(state.resolve()).encode()).hexdigest()[:6]}"


class Follower:
    """The copies of all backbones of a repository. Takes over what it can, and says once what it cannot."""

    def __init__(
        self, repository: Path, state: Path, connect: Callable[[], Source], name: str, say: Callable[[str], None]
    ) -> None:
        """`name`: under which this machine reports. `connect` returns a new connection to the source."""
        if not NAME.fullmatch(name):
            raise InvalidInput(f"{name!r} cannot be the name of a follower: take letters, digits, '.', '_' and '-'")
        folders = [path.parent for path in sorted(repository.glob(f"*/1/{EXPORTED_TENANTS}"))]
        if not folders:
            raise InvalidInput(f"{repository} contains no backbone: name a copy of the source's repository")
        self._followings: list[Following] = []
        try:
            for folder in folders:
                self._followings.append(Following(Copy(folder, state, connect, name, say)))
        except BaseException:
            self.close()
            raise

    def run(self, stop: threading.Event, once: bool = False, must_exist: bool = False) -> None:
        """Returns when it is stopped; or, `once`, when all that the source has is here. Then raises what has to be mended.

        `must_exist`: a source without a state has not begun yet, so `once` waits for it.
        """
        copies = [following.copy for following in self._followings]
        while not stop.is_set():
            for following in self._followings:
                following.step(once)
            if once and all(copy.is_whole and (copy.state.current_file.exists() or not must_exist) for copy in copies):
                return
            stop.wait(TICK)

    def finish(self, seconds: float) -> None:
        """Follows on while servers that are about to end read a copy, for so long at most."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(following.copy.is_read(time.time()) for following in self._followings):
            for following in self._followings:
                following.step()
            time.sleep(TICK)

    def close(self) -> None:
        for following in self._followings:
            following.close()


class Following:
    """A copy, and when the source and its readers are looked at."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self._look_at = self._report_at = 0.0
        self._is_lost = True  # the source does not answer, or refuses to
        self._is_foreign = False  # it is not that of this copy, so nothing that it says is done here
        self._reported: Reached | None = None

    def step(self, once: bool = False) -> None:
        if time.monotonic() >= self._look_at:
            self._look(once)
            self._look_at = time.monotonic() + (SOON if self._is_lost or self._is_foreign else SECONDS_BETWEEN_LOOKS)
        if not self._is_lost:
            self._report()

    def close(self) -> None:
        try:
            if not self._is_lost:
                self.copy.take_leave(time.time())
        except HplmError as error:
            self.copy.troubles.meet("reports", error)
        self.copy.close()

    def _look(self, once: bool) -> None:
        troubles = self.copy.troubles
        self._is_lost = self._is_foreign = is_equal = False
        try:
            self.copy.look()
            is_equal = self.copy.is_whole
            troubles.mend("source")
        except HplmError as error:
            if once and isinstance(error, InvalidInput):
                raise
            self._is_foreign = isinstance(error, Foreign)
            self._is_lost = isinstance(error, Away | InvalidInput) and not self._is_foreign
            troubles.meet("source", error)
        except OSError as error:
            troubles.meet("disk", error)
            with suppress(OSError):  # the same trouble
                self.copy.hear(time.time(), is_equal=False)  # no error of the source, so it has answered
            return
        try:
            self.copy.note()
            if not self._is_lost:
                self.copy.hear(time.time(), is_equal)
            troubles.mend("disk")
        except OSError as error:
            troubles.meet("disk", error)

    def _report(self) -> None:
        least = Reached() if self._is_foreign else self.copy.least(time.time())
        if least == self._reported and time.monotonic() < self._report_at:
            return
        self._report_at = time.monotonic() + SECONDS_BETWEEN_REPORTS
        try:
            self.copy.report(least)
        except HplmError as error:
            self._reported = least  # it is tried again in a second
            self.copy.troubles.meet("reports", HplmError(f"managers do not wait for this machine, because {error}"))
        else:
            self._reported = least
            self.copy.troubles.mend("reports")
