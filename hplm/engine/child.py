"""The engine's process: serves the upper halves of backbones to the model process that started it, and ends with it.

python -m hplm.engine.child CHANNEL BATCHES
"""

from __future__ import annotations

from hplm.engine.channel import Begin
from hplm.engine.host import Host, run
from hplm.engine.service import Service
from hplm.engine.settings import read_all
from hplm.model.openmp import apart


def open_service(begin: Begin, host: Host, service: type[Service] = Service) -> Service:
    places = list(zip(begin.folders, read_all(begin.parameters).values(), strict=True))
    return apart(lambda: service(places, begin.state, host.outbox, host.device_failed, host.shown))


if __name__ == "__main__":
    run(open_service)
