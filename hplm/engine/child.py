"""The engine's process: serves the upper halves of backbones to the model process that started it, and ends with it.

python -m hplm.engine.child CHANNEL BATCHES

Both are descriptors: of a socket, and of memory that shows what is in batches (`hplm.engine.in_flight`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from hplm.engine.channel import DEVICE_FAILED, Apart, Beat, Beaten, Begin, Channel, End, Ready, requests_in
from hplm.engine.outbox import Outbox
from hplm.engine.process import Process
from hplm.engine.service import Service
from hplm.engine.settings import read_all
from hplm.engine.threads import repeat
from hplm.errors import HplmError
from hplm.model.openmp import apart
from hplm.request.answers import CONFIDENCE, names_of
from hplm.request.form import Form

log = logging.getLogger(__name__)
BEAT_SECONDS = 1.0


class Child:
    """The main thread sends heartbeats. The process's other threads take in messages and answer them."""

    _service: Service
    _process: Process

    def __init__(self, channel: Channel, shown: int) -> None:
        self._channel = channel
        self._shown = shown
        self._outbox = Outbox(channel)
        self._unopened: SimpleQueue[Callable[[], None]] = SimpleQueue()  # submits requests whose generation is not open yet

    def run(self) -> None:
        begin = self._channel.receive()
        if not isinstance(begin, Begin):
            return  # the model process has ended already
        try:
            places = list(zip(begin.folders, read_all(begin.parameters).values(), strict=True))
            end = partial(os._exit, DEVICE_FAILED)  # the model process answers for it, and starts another engine
            self._service = apart(lambda: Service(places, begin.state, self._outbox.together, end, self._shown))
            self._service.separate(begin.apart)
            self._process = Process(self._service, self._channel, self._take_in)
            repeat(self._open_next, "open")
        except Exception as error:
            if not isinstance(error, HplmError):
                log.exception("the engine cannot be made")
            self._channel.send(Ready(failure=str(error)))
            return
        self._channel.send(Ready())
        while not self._process.ended.wait(BEAT_SECONDS):
            self._beat()
        self._service.close()
        self._beat()

    def _take_in(self, message: object) -> None:
        if isinstance(message, bytearray):
            with self._outbox.together():  # what is refused
                for request in requests_in(message):
                    self._take(*request)
        elif isinstance(message, Apart):
            self._service.separate(message)
        elif isinstance(message, End):
            self._process.close()
        else:
            os._exit(1)  # the model process has gone, and with it everybody who could be answered

    def _take(self, number: int, backbone: int, wanted: int, id: str, given: bytearray) -> None:
        try:
            form = Form(given)
            if self._service.has_open(form, backbone):
                self._submit(number, backbone, wanted, id, form)
            else:
                self._unopened.put(partial(self._submit, number, backbone, wanted, id, form))  # others do not wait for it
        except Exception as error:
            self._outbox.put(number, wanted, 0, error)

    def _submit(self, number: int, backbone: int, wanted: int, id: str, form: Form) -> None:
        respond = partial(self._outbox.put, number, wanted, form.head.version)
        try:
            self._service.submit(form, respond, id, CONFIDENCE in names_of(wanted), backbone, number)
        except Exception as error:
            respond(error)

    def _open_next(self) -> bool:
        self._unopened.get()()
        self._process.wake()
        return True

    def _beat(self) -> None:
        try:
            beaten = [self._counted(number) for number in range(len(self._service.served))]
            self._channel.send(Beat(beaten, self._process.busy_s))
        except OSError:
            log.info("the model process has gone")

    def _counted(self, backbone: int) -> Beaten:
        """Returns the counts of a backbone. A failure of counting leaves them out, but not the heartbeat."""
        instruments = self._service.served[backbone].instruments
        try:
            self._service.look(backbone)
            return Beaten(*instruments.meter.take())
        except Exception:
            log.exception("cannot send what was counted")
            return Beaten({}, {})


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the model process says when to end
    Child(Channel(int(sys.argv[1])), int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
