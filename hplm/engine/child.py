"""The engine's process: serves the upper halves of backbones to the model process that started it, and ends with it.

python -m hplm.engine.child CHANNEL BATCHES
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from hplm.engine.channel import Apart, Begin, Channel
from hplm.engine.host import Host, run
from hplm.engine.service import Service
from hplm.engine.settings import read_all
from hplm.engine.threads import repeat
from hplm.metrics.meter import Meter
from hplm.model.openmp import apart
from hplm.request.answers import CONFIDENCE, names_of
from hplm.request.form import Form


class Child(Host):
    _service: Service

    def __init__(self, channel: Channel, shown: int) -> None:
        super().__init__(channel, shown)
        self._unopened: SimpleQueue[Callable[[], None]] = SimpleQueue()  # submits requests whose generation is not open yet
        self._opening: list[float] = []  # when it began to submit one

    def _open(self, begin: Begin) -> None:
        places = list(zip(begin.folders, read_all(begin.parameters).values(), strict=True))
        together = self._outbox.together
        self._service = apart(lambda: Service(places, begin.state, together, self._device_failed, self._shown))
        self._separate(begin.apart)
        self._process = self._service.driven(self._channel, self._take_in)
        repeat(self._open_next, "open")

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
        submit = self._unopened.get()
        self._opening = [time.monotonic()]
        try:
            submit()
        finally:
            self._opening = []
        self._process.wake()
        return True

    def _begun(self) -> list[float]:
        return [*super()._begun(), *self._opening]

    def _separate(self, apart: Apart) -> None:
        self._service.separate(apart)

    def _meters(self) -> list[tuple[Meter, Callable[[], None]]]:
        every = enumerate(self._service.served)
        return [(served.instruments.meter, partial(self._service.look, number)) for number, served in every]

    def _close(self) -> None:
        self._service.close()


def main() -> None:
    run(Child)


if __name__ == "__main__":
    main()
