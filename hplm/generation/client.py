"""Passes prompts on to the process of a decoder, and hands on the parts of answers in their order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hplm.engine.channel import Cancel
from hplm.engine.client import EngineClient, Pending
from hplm.engine.worker import Workers
from hplm.errors import HplmError
from hplm.metrics.meter import Meter
from hplm.registry.store import Place
from hplm.request.answers import Reply

log = logging.getLogger(__name__)


class PendingPrompt(Pending):
    __slots__ = ("grows", "is_cancelled")

    def __init__(self, form: bytes, respond: Callable[..., HplmError | None], defer: Callable[[], None]) -> None:
        super().__init__(form, respond, defer)
        self.grows = self.is_cancelled = False


class DecoderClient(EngineClient[PendingPrompt]):
    """Parts of an answer stay in order: the thread that receives sends them, or another one while that one has more to do."""

    def __init__(
        self,
        folder: Path,
        parameters: Mapping[str, str],
        state: Place | None,
        meter: Meter,
        workers: Callable[..., Workers] = Workers,
    ) -> None:
        """`workers`: as in `EngineClient`."""
        self._handed_over = self._sent = 0  # parts that the other thread got, and those that it has sent
        super().__init__("hplm.generation.service", [folder], parameters, state, [meter], 1, workers)

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
