"""Reads the prompts of tenants in turn. What is short, while nobody waits, is read at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hplm.errors import DeadlineMissed, HplmError, QueueFull, for_client
from hplm.generation.loop import Loop
from hplm.generation.request import DecoderRequest
from hplm.scheduling.limits import Limits
from hplm.scheduling.turns import Turns
from hplm.threads import repeat

log = logging.getLogger(__name__)
SHORT = 2000  # bytes of a prompt that is read in less than a millisecond


class PromptReader:
    """A loop whose requests have their prompts read first: `hplm.process.driver` drives it as it drives an encoder.

    It ends requests that the loop does not get.
    """

    def __init__(self, loop: Loop, limits: Limits) -> None:
        """`limits`: how many prompts, and bytes of them, may wait."""
        self.wait_s, self.expire, self.prepare, self.compute = loop.wait_s, loop.expire, loop.prepare, loop.compute
        self.abandon = loop.abandon
        self.wake: Callable[[], None] = lambda: None  # lets the threads of the process look at the loop
        self._loop = loop
        self._turns: Turns[DecoderRequest] = Turns(limits, limits.work, time.monotonic_ns)
        self._since: float | None = None  # when the thread began to read a prompt
        self._thread = repeat(self._read_next, "read")

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def is_drained(self) -> bool:
        return self._loop.is_drained

    def busy_since(self) -> list[float]:
        """Returns when the thread began to read its prompt, if it reads one."""
        since = self._since
        return [since] if since is not None else []

    def submit(self, request: DecoderRequest, at_once: bool) -> None:
        """Takes a request, or raises. `at_once`: its prompt may be read here, if it is short."""
        if at_once and request.unread_bytes <= SHORT and not len(self) and self._since is None:
            self._read(request)
            return
        for one in self._turns.enqueue_item(request, request.unread_bytes):
            full = QueueFull("too many prompts wait, and its tenant has the most: retry after 0.1 s")
            if one is request:
                raise full
            one.refuse(full)

    def close(self) -> None:
        """Refuses new requests. Those that were taken are still read and answered."""
        self._turns.close()

    def join(self) -> None:
        self._thread.join()

    def _read_next(self) -> bool:
        turn = self._turns.take(1)
        if turn is None:
            self._loop.close()
            self.wake()
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
        self.wake()
        return True

    def _read(self, request: DecoderRequest) -> None:
        try:
            read, request.read = request.read, None  # it keeps the prompt's text
            if read is not None and not request.cancelled:  # otherwise the loop ends it before it starts
                read(request)
            self._loop.enqueue(request)
        except Exception as error:
            if not isinstance(error, HplmError):
                log.exception("cannot read a prompt")
            request.refuse(for_client(error, "reading the prompt"))
