"""Reads the prompts of tenants in turn. What is short, while nobody waits, is read at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from hplm.engine.threads import repeat
from hplm.errors import DeadlineMissed, HplmError, QueueFull, for_client
from hplm.generation.request import Request
from hplm.scheduling.limits import Limits
from hplm.scheduling.turns import Turns

log = logging.getLogger(__name__)
SHORT = 2000  # bytes of a prompt that is read in less than a millisecond


@dataclass(frozen=True, eq=False)
class Unread:
    """A request whose prompt still has to be read, as `Turns` sees it."""

    request: Request
    read: Callable[[], None]
    left: int  # bytes of its prompt
    owner: int
    deadline_ns: int


class Reader:
    """It ends requests that it does not pass on."""

    def __init__(
        self,
        limits: Limits,
        pass_on: Callable[[Request], None],
        drained: Callable[[], None],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`limits`: how many prompts, and bytes of them, may wait. `pass_on` takes a request that was read, or raises.

        `drained` is called when everything was read, after `close`. `wake` is called by the thread after each of them.
        """
        self._turns: Turns[Unread] = Turns(limits, limits.work, time.monotonic_ns)
        self._pass_on, self._drained, self._wake = pass_on, drained, wake
        self._since: float | None = None  # when the thread began to read a prompt
        self._thread = repeat(self._read_next, "read")

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def busy_s(self) -> float:
        """The time that the thread has been reading one prompt."""
        since = self._since
        return time.monotonic() - since if since is not None else 0.0

    def submit(self, request: Request, read: Callable[[], None], size: int, at_once: bool) -> None:
        """Takes a request, or raises. `read` sets the tokens of its prompt, which has so many bytes.

        `at_once`: it may be called here, if the prompt is short.
        """
        unread = Unread(request, read, max(1, size), request.source.uid, request.start_by_ns)
        if at_once and size <= SHORT and not len(self) and self._since is None:
            self._read(unread)
            return
        for one in self._turns.offer(unread):
            full = QueueFull("too many prompts wait, and its tenant has the most: retry after 0.1 s")
            if one is unread:
                raise full
            one.request.refuse(full)

    def close(self) -> None:
        """Takes no further prompts. Those that wait are still read."""
        self._turns.close()

    def join(self) -> None:
        self._thread.join()

    def _read_next(self) -> bool:
        turn = self._turns.take(1)
        if turn is None:
            self._drained()
            self._wake()
            return False
        taken, late = turn
        for one in late:
            one.request.refuse(DeadlineMissed.after(one.request.arrival_ns, one.deadline_ns))
        for one in taken:
            self._since = time.monotonic()
            try:
                self._read(one)
            finally:
                self._since = None
        self._wake()
        return True

    def _read(self, unread: Unread) -> None:
        request = unread.request
        try:
            if not request.cancelled:  # otherwise the loop ends it before it starts
                unread.read()
            self._pass_on(request)
        except Exception as error:
            if not isinstance(error, HplmError):
                log.exception("cannot read a prompt")
            request.refuse(for_client(error, "reading the prompt"))
