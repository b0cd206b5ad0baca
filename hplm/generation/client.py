"""Passes prompts on to the process of a decoder, and hands on the parts of answers in their order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from hplm.errors import HplmError
from hplm.process.channel import Cancel
from hplm.process.client import EngineClient, Pending
from hplm.request.answers import Reply

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PendingPrompt(Pending):
    grows: bool = False
    is_cancelled: bool = False


class DecoderClient(EngineClient[PendingPrompt]):
    """Parts of an answer stay in order: the thread that receives sends them, or another one while that one has more to do."""

    module = "hplm.generation.service"
    _handed_over = _sent = 0  # parts that the other thread got, and those that it has sent

    def submit(self, requests: Sequence[PendingPrompt]) -> None:
        super().submit(requests)
        for one in requests:
            if one.is_cancelled:  # maybe before it had its number, or before the engine got it
                self.cancel(one)

    def cancel(self, one: PendingPrompt) -> None:
        """Ends a request soon. It still gets its end."""
        one.is_cancelled = True
        worker = self.workers.current
        if worker is not None:
            with suppress(OSError):  # it has ended, and with it the request
                worker.channel.send(Cancel(one.number))

    def _answer_all(self, reply: Reply, alone: bool) -> None:
        ((number, _),) = reply.requests
        one = self._held.get(number) if reply.end is reply.failure is None else self._taken(number)
        if one is None:
            return
        one.grows = True
        if reply.end is not None:
            self._separation.answered(reply.end.tenant)
        if not (reply.outputs or reply.failure):
            return
        if alone and self._handed_over == self._sent:
            self._send(one, reply)
        else:
            self._share([(one, reply)])

    def _share(self, unsent: list[tuple[PendingPrompt, Reply | HplmError]]) -> None:
        self._handed_over += len(unsent)
        super()._share(unsent)

    def _answer(self, unsent: Sequence[tuple[PendingPrompt, Reply | HplmError]]) -> None:
        for one, answer in unsent:
            self._send(one, answer)
            self._sent += 1

    def _send(self, one: PendingPrompt, answer: Reply | HplmError) -> None:
        try:
            one.respond(answer)
        except Exception:
            log.exception("cannot send a part of an answer: the request is cancelled")
            self.cancel(one)
