"""The engine's process: serves the upper half of a backbone to the model process that started it, and ends with it.

python -m hplm.engine.child DESCRIPTOR
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback

from hplm.engine.answer import fill, size_of
from hplm.engine.channel import Ask, Beat, Begin, Channel, End, Ready, Reply
from hplm.engine.instruments import Counted
from hplm.engine.memory import LARGE
from hplm.engine.request import Answer
from hplm.engine.service import Service
from hplm.engine.settings import Settings
from hplm.errors import Broken, HplmError, kind_of

log = logging.getLogger(__name__)
BEAT_SECONDS = 1.0


class Child:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ending = threading.Event()

    def run(self) -> None:
        begin = self._channel.receive()
        if not isinstance(begin, Begin):
            return  # the model process has ended already
        try:
            service = Service(begin.folder, Settings.read(begin.parameters), begin.state)
        except Exception as error:
            if not isinstance(error, HplmError):
                log.exception("the engine cannot be made")
            self._channel.send(Ready(failure=str(error)))
            return
        self._channel.send(Ready())
        beats = threading.Thread(target=self._beat, args=(service,), name="beat", daemon=True)
        beats.start()
        while isinstance(message := self._channel.receive(), Ask):
            self._submit(service, message)
        if not isinstance(message, End):
            os._exit(1)  # the model process has gone, and with it everybody who could be answered
        service.close()
        self._ending.set()
        beats.join()

    def _submit(self, service: Service, ask: Ask) -> None:
        def respond(answer: Answer, counted: Counted = ()) -> None:
            self._channel.send(_reply(ask, answer, counted))

        try:
            service.submit(ask.ticket, ask.looked_up, respond, ask.passages, ask.id)
        except Exception as error:
            respond(error)

    def _beat(self, service: Service) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(BEAT_SECONDS)
            try:
                service.look()
                counts, levels = service.instruments.meter.take()
                self._channel.send(Beat(counts, levels, service.instruments.busiest, service.computing_s))
            except OSError:  # the model process has gone
                return
            except Exception:
                log.exception("cannot send what was counted")


def _reply(ask: Ask, answer: Answer, counted: Counted) -> Reply:
    try:
        if not isinstance(answer, Exception):
            outputs = fill(answer).outputs(ask.wanted, ask.ticket.version)
            return Reply(ask.number, outputs, counted if size_of(outputs) >= LARGE else ())
    except Exception as error:
        answer = error
    if not isinstance(answer, HplmError):  # its message may hold what the client sent
        raised = "".join(traceback.format_tb(answer.__traceback__))
        log.error("the engine failed: %s, raised in\n%s", kind_of(answer), raised)
        answer = Broken(f"the engine failed ({kind_of(answer)}): the server's log says where")
    return Reply(ask.number, (answer.status, answer.wire()))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the model process says when to end
    Child(Channel(int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
