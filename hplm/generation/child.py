"""The process of a decoder: generates text for the model process that started it, and ends with it.

python -m hplm.generation.child CHANNEL BATCHES
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hplm.engine.backbone import Backbone
from hplm.engine.channel import Apart, Begin
from hplm.engine.host import Host, run
from hplm.engine.process import Process
from hplm.engine.views import Watch
from hplm.generation.asked import Asked
from hplm.generation.service import Service
from hplm.generation.settings import read_settings
from hplm.metrics.meter import Meter
from hplm.model.openmp import apart
from hplm.model.prompts import Prompts
from hplm.parameters import yes_or_no
from hplm.plot.table import Table


class Child(Host):
    _service: Service
    _watch: Watch

    def _open(self, begin: Begin) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the other cores compute
        settings = read_settings(begin.parameters)
        preloads = yes_or_no(begin.parameters, "plot_preload")

        def prepare(table: Table) -> None:
            """Opens what the first request would otherwise wait for."""
            _, rows = table.index, table.rows
            if preloads:
                rows.preload()

        (folder,) = begin.folders
        backbone = Backbone(Path(folder), begin.state, prepare)
        prompts = Prompts.load(backbone.folder / Backbone.TOKENIZER, backbone.config)
        given = settings, self._outbox.together, self._device_failed, self._shown
        self._service = apart(lambda: Service(backbone, prompts, *given))
        self._separate(begin.apart)
        backbone.catch_up()
        self._watch = Watch(backbone)
        self._process = Process(self._service.reader, (self._service.threads, 1), self._channel, self._take_in)
        self._service.reader.wake = self._process.wake

    def _take(self, number: int, backbone: int, wanted: int, id: str, given: bytearray) -> None:
        put = partial(self._outbox.put, number, wanted, 0)
        try:
            self._service.take(Asked.read(given), number, put)
        except Exception as error:
            put(error)

    def _cancel(self, number: int) -> None:
        self._service.cancel(number)

    def _separate(self, apart: Apart) -> None:
        self._service.separate(apart)

    def _meters(self) -> list[tuple[Meter, Callable[[], None]]]:
        return [(self._service.meter, self._service.look)]

    def _begun(self) -> list[float]:
        return [*super()._begun(), *self._service.reader.begun()]

    def _close(self) -> None:
        self._service.reader.join()
        self._watch.close()


if __name__ == "__main__":
    run(Child)
