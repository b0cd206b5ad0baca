"""The backbone that an engine serves: its tables, layers, slots, counts and quotas."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import torch

from hplm.engine.backbone import Backbone
from hplm.engine.engine import Engine
from hplm.engine.instruments import Instruments
from hplm.engine.laid import StagingSettings
from hplm.engine.packing import PACKED, read_packing
from hplm.engine.settings import EncoderSettings
from hplm.engine.staging import EncoderStager
from hplm.errors import HplmError
from hplm.location import Location
from hplm.lookup.views import RegistryWatcher
from hplm.plot.rows import StoredRows
from hplm.plot.table import Table
from hplm.tenants.quotas import Quotas

log = logging.getLogger(__name__)


def open_engine(backbone: Backbone, settings: EncoderSettings, side_by_side: bool = True) -> tuple[Engine, EncoderStager]:
    """Returns what computes batches, and what makes them ready. It brings no rows into memory.

    They compute with as many threads of the CPU as the calling thread, large batches `side_by_side`.
    """
    precision = settings.precision
    stages, is_packed = settings.stages, settings.packing == PACKED
    divides = side_by_side and is_packed and not stages and not settings.on_accelerator
    threads = torch.get_num_threads() if divides else 1
    engine = Engine(backbone.upper(), settings.device, precision.dtype, precision.eight_bits, stages, threads)
    staging = StagingSettings(
        settings.slots,
        settings.device,
        precision.dtype,
        resident_rows=settings.plot_hot if settings.on_accelerator else 0,
        packing=read_packing(settings.packing, engine.seconds, backbone.config.near),
        few_sizes=engine.takes_few_sizes,
        stages=stages,
        threads=threads,
    )
    return engine, EncoderStager(backbone, staging)


class Served:
    def __init__(self, folder: Path, settings: EncoderSettings, state: Location | None = None) -> None:
        self._settings = settings
        self._serving = False
        self.backbone = Backbone(folder, state, self._prepare)
        self._serving = True
        self.engine, self.stager = open_engine(self.backbone, settings)
        self.instruments = Instruments(settings.journal, self.name)
        self.quotas = Quotas()
        self.backbone.catch_up()
        self._watcher = RegistryWatcher(self.backbone)
        where = ", ".join(map(str, settings.stages)) or settings.device
        log.info("serving %s on %s in %s", self.name, where, settings.precision.name)

    @property
    def name(self) -> str:
        return self.backbone.config.name

    def stop_watching(self) -> None:
        """Ends the threads that follow its registry."""
        self._watcher.close()

    def _prepare(self, table: Table) -> None:
        """Maps the rows now and reads the configured ones into memory, in the background once requests are served."""
        rows = table.rows
        if self._serving:
            threading.Thread(target=self._bring_in_beside, args=(rows,), name="preload", daemon=True).start()
        else:
            self._preload(rows)

    def _bring_in_beside(self, rows: StoredRows) -> None:
        try:
            self._preload(rows)
        except (HplmError, OSError) as error:
            log.error("a new table is served from disk instead of memory: %s", error)

    def _preload(self, rows: StoredRows) -> None:
        """Reads the configured rows into memory. An accelerator gets the hot rows with the first batch that needs them."""
        if self._settings.plot_preload:
            rows.preload()
        elif self._settings.plot_hot:
            rows.preload(self._settings.plot_hot)
