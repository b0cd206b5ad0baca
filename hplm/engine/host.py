"""The process of an engine, of encoders or of a decoder: what the model process tells it, and what it tells that one."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from hplm.engine.channel import DEVICE_FAILED, Apart, Beat, Beaten, Begin, Cancel, Channel, End, Ready, requests_in
from hplm.engine.outbox import Outbox
from hplm.engine.process import Process
from hplm.engine.threads import Beats
from hplm.errors import HplmError
from hplm.metrics.meter import Meter

log = logging.getLogger(__name__)
BEAT_SECONDS = 1.0


class Host(ABC):
    """The main thread sends heartbeats. The process's other threads take in messages and answer them.

    `_outbox` takes answers. `_device_failed` ends the process: the model process answers for it, and starts another one.
    """

    _process: Process

    def __init__(self, channel: Channel, shown: int) -> None:
        """`shown`: the descriptor of memory that shows what is in batches (`hplm.engine.in_flight`)."""
        self._channel = channel
        self._outbox = Outbox(channel)
        self._shown = shown
        self._beats = Beats()
        self._device_failed = partial(os._exit, DEVICE_FAILED)

    @abstractmethod
    def _open(self, begin: Begin) -> None:
        """Makes the engine, separates tenants, and starts the threads; or raises."""

    @abstractmethod
    def _take(self, number: int, backbone: int, wanted: int, id: str, given: bytearray) -> None:
        """Takes a request, and answers it through the outbox. It does not raise."""

    @abstractmethod
    def _separate(self, apart: Apart) -> None:
        """Sets which tenants run alone, and which are refused."""

    @abstractmethod
    def _meters(self) -> list[tuple[Meter, Callable[[], None]]]:
        """Returns the meter of each backbone, and what updates it."""

    @abstractmethod
    def _close(self) -> None:
        """Ends the engine. Its requests are answered before."""

    def _cancel(self, number: int) -> None:
        """Ends a request whose answer nobody reads."""
        raise NotImplementedError  # only decoders are told

    def _begun(self) -> list[float]:
        """Returns when the pieces of work began that threads are at now."""
        return self._process.begun()

    def run(self) -> None:
        begin = self._channel.receive()
        if not isinstance(begin, Begin):
            return  # the model process has ended already
        try:
            self._open(begin)
        except Exception as error:
            if not isinstance(error, HplmError):
                log.exception("the engine cannot be made")
            self._channel.send(Ready(failure=str(error)))
            return
        self._channel.send(Ready())
        while not self._process.ended.wait(BEAT_SECONDS):
            self._beat()
        self._close()
        self._beat()

    def _take_in(self, message: object) -> None:
        if isinstance(message, bytearray):
            with self._outbox.together():  # what is refused
                for request in requests_in(message):
                    self._take(*request)
        elif isinstance(message, Apart):
            self._separate(message)
        elif isinstance(message, Cancel):
            self._cancel(message.number)
        elif isinstance(message, End):
            self._process.close()
        else:
            os._exit(1)  # the model process has gone, and with it everybody who could be answered

    def _beat(self) -> None:
        busy_s, beaten = BEAT_SECONDS * self._beats.count(self._begun()), [self._counted(*own) for own in self._meters()]
        try:
            self._channel.send(Beat(beaten, busy_s))
        except OSError:
            log.info("the model process has gone")
        except Exception:
            log.exception("cannot send what was counted")
            self._channel.send(Beat([Beaten({}, {}) for _ in beaten], busy_s))

    @staticmethod
    def _counted(meter: Meter, look: Callable[[], None]) -> Beaten:
        """Returns the counts of a backbone. A failure of counting leaves them out, but not the heartbeat."""
        try:
            look()
            return Beaten(*meter.take())
        except Exception:
            log.exception("cannot send what was counted")
            return Beaten({}, {})


def run(host: type[Host]) -> None:
    """Runs the process. Its arguments are the descriptors of a socket, and of memory that shows what is in batches."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the model process says when to end
    faulthandler.register(signal.SIGUSR1)  # it writes where its threads stand, when `hplm.server.stacks` asks
    host(Channel(int(sys.argv[1])), int(sys.argv[2])).run()
