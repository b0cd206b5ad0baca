"""A backbone's upper half as a service: settings in, a running pipeline out, requests checked before they enter it."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import numpy as np
import torch

from hplm.engine.backbone import Backbone, Watch
from hplm.engine.engine import Engine
from hplm.engine.instruments import Instruments
from hplm.engine.journal import Journal
from hplm.engine.lookup import PAD
from hplm.engine.packing import read_packing
from hplm.engine.pipeline import Pipeline
from hplm.engine.request import LookedUp, Request, Respond, Trip, Work
from hplm.engine.settings import Settings
from hplm.engine.staging import Stager, StagingSettings
from hplm.errors import DeadlineMissed, Draining, HplmError, InvalidInput
from hplm.plot.rows import Rows as TableRows
from hplm.plot.table import Table
from hplm.scheduling.policy import policy
from hplm.scheduling.queue import Queue
from hplm.scheduling.scheduler import Limits, Scheduler
from hplm.scheduling.waiting import Capacity
from hplm.tasks import TASKS, Rows
from hplm.tenants.quotas import Quotas

log = logging.getLogger(__name__)
ANSWERING_NS = 2_000_000  # from computed to the client: the way back through the server
DRAIN_SECONDS = 8.0  # below the exit timeout that `hplm serve` gives Triton
MOST_NUMBERS = 1 << 24  # in an answer: logits, of all rows
TICKET_SECONDS = 30  # from one model to the other; what a ticket says of a tenant and its keys must not outlast them for long


class Service:
    def __init__(self, folder: Path, settings: Settings, state: Path | None = None) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._settings = settings
        self._serving = False
        self._backbone = Backbone(folder, state, self._prepare)
        self._serving = True
        self._positions = self._backbone.config.positions
        engine = Engine(self._backbone.upper(), settings.device, settings.dtype)
        staging = StagingSettings(
            settings.slots,
            settings.device,
            settings.dtype,
            resident_rows=settings.plot_hot if self._on_accelerator else 0,
            packing=read_packing(settings.packing, engine.seconds),
            overlap=settings.overlap,
        )
        # Two batches are in flight at most, and both pin their slots.
        capacity = Capacity(settings.batch_tokens, settings.batch_tokens, settings.slots // 2)
        limits = Limits(settings.queue_texts, settings.queue_bytes)
        scheduler = Scheduler(
            policy(settings.policy), limits, settings.admission, commit_ns=settings.commit_ns, answering_ns=ANSWERING_NS
        )
        line = Queue(scheduler, time.monotonic_ns)
        self._line, self._stager = line, Stager(self._backbone, staging)
        self.instruments = Instruments(Journal(settings.journal))
        self._pipeline = Pipeline(line, capacity, self._stager, engine, self.instruments)
        self._quotas = Quotas()
        self._watch = Watch(self._backbone)
        log.info("serving %s on %s in %s", self._backbone.config.name, settings.device, settings.dtype)

    def submit(self, looked_up: LookedUp, respond: Respond) -> None:
        """Takes a request with a valid ticket, or raises why not; what is taken is answered through `respond`, once."""
        ticket = looked_up.ticket
        if ticket.export != self._backbone.view.snapshot.export_number:
            raise Draining("another export of this backbone is being loaded: send the request again")
        view = self._backbone.at(ticket.generation)
        tenant = view.snapshot.by_uid(ticket.uid)
        trip = Trip(looked_up.id, ticket.arrival_ns, ticket.deadline_ns, time.monotonic_ns(), len(looked_up.addresses))

        def leave(answer: list[Rows] | Exception) -> None:
            # Before the answer leaves: who waits for it to send the next must not meet the one that is done.
            self._quotas.give_back(tenant)
            try:
                self.instruments.left(trip, tenant, answer)
            finally:
                respond(answer)

        try:
            if trip.taken_ns - ticket.arrival_ns > TICKET_SECONDS * 1_000_000_000:
                raise DeadlineMissed(f"the request was on its way for more than {TICKET_SECONDS} s: send it again")
            self._quotas.take(tenant)
            try:
                top_k = min(ticket.top_k, len(tenant.labels))
                request = Request(view, tenant, trip.texts, top_k, leave, trip)
                works = self._works(request, looked_up)
                trip.tokens = sum(work.tokens for work in works)
                self._pipeline.submit(request, works, ticket.arrival_ns, ticket.deadline_ns, ticket.priority)
            except BaseException:
                self._quotas.give_back(tenant)  # it was not taken, so nobody answers it
                raise
        except Exception as error:
            self.instruments.left(trip, tenant, error)
            raise

    def _works(self, request: Request, looked_up: LookedUp) -> list[Work]:
        """Checked: tickets are signed, what came beside them is not."""
        tenant, passages = request.tenant, looked_up.passages
        if looked_up.ticket.top_k and not tenant.task_object.allows_top_k:
            able = " or ".join(task.name for task in TASKS.values() if task.allows_top_k)
            raise InvalidInput(f"top_k is for tenants that {able}; tenant {tenant.id!r} has the task {tenant.task!r}")
        if not tenant.task_object.needs_pair:
            passages = [""] * len(looked_up.addresses)
        elif passages is None or len(passages) != len(looked_up.addresses):
            raise InvalidInput("TEXT_PAIR is not what the lookup model was sent: it holds the passage of each text")
        texts, widest, _ = looked_up.spans.shape
        if texts * widest * len(tenant.labels) > MOST_NUMBERS:
            raise InvalidInput(
                f"{texts:,} texts with up to {widest:,} rows of {len(tenant.labels):,} labels are answered in more than "
                f"{MOST_NUMBERS:,} numbers: send fewer texts, or shorter ones"
            )
        chain = request.view.forest.chain(tenant.domain, tenant.domain_version)
        works = []
        for i, (addresses, segments, spans) in enumerate(
            zip(looked_up.addresses, looked_up.segments, looked_up.spans, strict=True)
        ):
            length, rows = _used(addresses), _used(spans[:, 1])
            # Copies: what waits keeps its own part of the rectangles alive, not all of them.
            own = addresses[:length].copy(), segments[:length].copy(), spans[:rows].copy()
            work = Work(request, i, *own, passages[i])
            if not (
                1 <= length <= self._positions
                and len(work.segments) == length
                and chain.holds(work.addresses)
                and (work.segments < self._backbone.config.segments).all()
                and rows
                and len(work.read) <= length
                and (work.spans[:, 0] < length).all()
            ):
                raise InvalidInput("ROWS, SEGMENTS or SPANS are not what the lookup model made for this ticket")
            works.append(work)
        return works

    def look(self) -> None:
        """Brings the instruments up to date."""
        self.instruments.look(self._line, self._stager)

    def close(self) -> None:
        self._watch.close()
        self._pipeline.close(DRAIN_SECONDS)
        self.instruments.close()

    @property
    def _on_accelerator(self) -> bool:
        return self._settings.device.type != "cpu"

    def _prepare(self, table: Table) -> None:
        """Maps the rows now, and brings into memory what was asked for: while others are served, beside them."""
        rows = table.rows
        if self._serving:
            threading.Thread(target=self._bring_in_beside, args=(rows,), name="preload", daemon=True).start()
        else:
            self._bring_in(rows)

    def _bring_in_beside(self, rows: TableRows) -> None:
        try:
            self._bring_in(rows)
        except (HplmError, OSError) as error:
            log.error("a new table is served from disk, not from memory: %s", error)

    def _bring_in(self, rows: TableRows) -> None:
        """On an accelerator, the hot ones go on to the device, with the first batch that needs one."""
        if self._settings.plot_preload:
            rows.preload()
        if self._settings.plot_hot and self._on_accelerator:
            rows.preload(self._settings.plot_hot)
        elif self._settings.plot_hot:
            rows.lock(self._settings.plot_hot)


def _used(row: np.ndarray) -> int:
    """How much of a row is not padding."""
    return int((row != PAD).sum())
