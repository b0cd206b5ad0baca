"""The process of a decoder: generates text for the model process that started it, and ends with it.

python -m hplm.generation.child CHANNEL BATCHES
"""

from __future__ import annotations

import os
from pathlib import Path

from hplm.engine.backbone import Backbone
from hplm.engine.channel import Begin
from hplm.engine.host import Host, run
from hplm.generation.service import Service
from hplm.generation.settings import read_settings
from hplm.model.openmp import apart
from hplm.model.prompts import Prompts
from hplm.parameters import yes_or_no
from hplm.plot.table import Table


def open_service(begin: Begin, host: Host) -> Service:
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
    service = apart(lambda: Service(backbone, prompts, settings, host.outbox, host.device_failed, host.shown))
    backbone.catch_up()
    return service


if __name__ == "__main__":
    run(open_service)
