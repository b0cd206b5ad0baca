"""Reads the prompts of tenants in turn. What is short, while nobody waits, is read at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hplm.engine.threads import repeat
from hplm.errors import DeadlineMissed, HplmError, QueueFull, for_client
from hplm.generation.request import Request
from hplm.scheduling.limits import Limits
from hplm.scheduling.turns import Turns

log = logging.getLogger(__name__)
SHORT = 2000  # bytes of a prompt that is read in less than a millisecond


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
        self._turns: Turns[Request] = Turns(limits, limits.work, time.monotonic_ns)
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

    def submit(self, request: Request, at_once: bool) -> None:
        """Takes a request, or raises. `at_once`: its prompt may be read here, if it is short."""
        if at_once and request.left <= SHORT and not len(self) and self._since is None:
            self._read(request)
            return
        for one in self._turns.offer(request):
            full = QueueFull("too many prompts wait, and its tenant has the most: retry after 0.1 s")
            if one is request:
                raise full
            one.refuse(full)

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
            one.refuse(DeadlineMissed.after(one.arrival_ns, one.deadline_ns))
        for one in taken:
            self._since = time.monotonic()
            try:
                self._read(one)
            finally:
                self._since = None
        self._wake()
        return True

    def _read(self, request: Request) -> None:
        try:
            read, request.read = request.read, None  # it keeps the prompt's text
            if read is not None and not request.cancelled:  # otherwise the loop ends it before it starts
                read(request)
            self._pass_on(request)
        except Exception as error:
            if not isinstance(error, HplmError):
                log.exception("cannot read a prompt")
            request.refuse(for_client(error, "reading the prompt"))
