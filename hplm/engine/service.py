"""The upper half of a backbone as a service: builds the pipeline from settings, and checks requests before they enter it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from hplm.engine.backbone import Backbone
from hplm.engine.engine import Engine
from hplm.engine.instruments import Instruments
from hplm.engine.journal import Journal
from hplm.engine.looked_up import LookedUp
from hplm.engine.packing import read_packing
from hplm.engine.pipeline import Pipeline, Together
from hplm.engine.request import Answer, Request, Text
from hplm.engine.settings import Settings
from hplm.engine.staging import Stager, StagingSettings
from hplm.engine.views import Watch
from hplm.errors import Broken, DeadlineMissed, Draining, HplmError, InvalidInput
from hplm.levels.plan import Plan
from hplm.metrics.meter import Counted
from hplm.model.openmp import compute_with
from hplm.plot.rows import StoredRows
from hplm.plot.table import Table
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.queue import Queue
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.waiting import Capacity
from hplm.tasks import TASKS
from hplm.tenants.level import FULL
from hplm.tenants.quotas import Quotas
from hplm.tenants.snapshot import Tenant
from hplm.tenants.ticket import LEAVES, Ticket

log = logging.getLogger(__name__)
ANSWERING_NS = 2_000_000  # from the end of computing to the client, through the server
DRAIN_SECONDS = 8.0  # less than the exit timeout that `hplm serve` gives Triton
MOST_NUMBERS = 1 << 24  # the most logits of an answer, over all rows
TICKET_SECONDS = 30  # how long a ticket is valid: it must not outlive a revoked key for long


def open_engine(backbone: Backbone, settings: Settings) -> tuple[Engine, Stager]:
    """Returns what computes batches, and what makes them ready. It brings no rows into memory."""
    precision = settings.precision
    stages = settings.stages
    engine = Engine(backbone.upper(), settings.device, precision.dtype, precision.eight_bits, backbone.stacks(), stages)
    staging = StagingSettings(
        settings.slots,
        settings.device,
        precision.dtype,
        resident_rows=settings.plot_hot if settings.on_accelerator else 0,
        packing=read_packing(settings.packing, engine.seconds),
        few_sizes=engine.takes_few_sizes,
        depths=engine.depths,
        batch_tokens=settings.batch_tokens,
        overlap=settings.overlap,
        stages=stages,
    )
    return engine, Stager(backbone, staging)


class Service:
    def __init__(
        self,
        folder: Path,
        settings: Settings,
        state: Path | None = None,
        together: Together = nullcontext[None],
        device_failed: Callable[[], None] = lambda: None,
    ) -> None:
        """`together` surrounds the answers to a batch, so that they may leave as one message. `device_failed` is called after a
        fault of the device that stays, before anybody is told.

        The thread that makes a service should end (`hplm.model.openmp`).
        """
        threads = settings.threads or torch.get_num_threads()
        if settings.stages and not settings.on_accelerator:
            threads = 1  # each stage has one core
        compute_with(threads)
        self._settings = settings
        self._serving = False
        self._locked_rows = 0 if settings.on_accelerator else settings.plot_hot
        self._backbone = Backbone(folder, state, self._prepare)
        self._lock(self._backbone.view.forest.tables())
        self._serving = True
        self._positions = self._backbone.config.positions
        engine, stager = open_engine(self._backbone, settings)
        self._shares = {stack: depth / engine.depths[FULL] for stack, depth in engine.depths.items()}
        # All batches in flight pin their slots.
        in_flight = settings.in_flight
        capacity = Capacity(settings.batch_tokens, settings.batch_tokens, settings.slots // in_flight, in_flight)
        limits = Limits(settings.queue_texts, settings.queue_bytes)
        scheduler: Scheduler[Text] = Scheduler(
            policy(settings.policy), limits, settings.admission, settings.commit_ns, settings.batch_ns, ANSWERING_NS
        )
        line = Queue(scheduler, time.monotonic_ns)
        self._line, self._stager = line, stager
        self.instruments = Instruments(Journal(settings.journal))
        self._pipeline = Pipeline(line, capacity, self._stager, engine, self.instruments, together, device_failed, threads)
        self._quotas = Quotas()
        self._watch = Watch(self._backbone)
        where = ", ".join(map(str, settings.stages)) or settings.device
        log.info("serving %s on %s in %s", self._backbone.config.name, where, settings.precision.name)

    def submit(
        self,
        ticket: Ticket,
        looked_up: LookedUp,
        respond: Callable[[Answer, Counted], None],
        id: str = "",
        with_confidence: bool = False,
    ) -> None:
        """Takes a request with a valid ticket, or raises. A request that was taken is answered once, through `respond`.

        `respond` takes the answer, and the series in which it is counted. Confidences are computed only `with_confidence`.
        """
        if ticket.export != self._backbone.view.snapshot.export_number:
            raise Draining("another export of this backbone is being loaded: send the request again")
        view = self._backbone.at(ticket.generation)
        tenant = view.snapshot.by_uid(ticket.uid)
        count = looked_up.texts
        answered = partial(self._leave, respond)
        request = Request(ticket, view, tenant, count, answered, id, time.monotonic_ns(), with_confidence, self._shares)
        try:
            if request.taken_ns - ticket.arrival_ns > TICKET_SECONDS * 1_000_000_000:
                raise DeadlineMissed(f"the request was on its way for more than {TICKET_SECONDS} s: send it again")
            self._quotas.take(tenant, count, looked_up.tokens)
            try:
                self._check(request, looked_up, ticket.top_k)
                request.plan = self._plan(tenant, ticket, looked_up.tokens)
                request.tokens = looked_up.tokens
                displaced = self._line.offer(request.texts_from(looked_up))
            except BaseException:
                self._quotas.give_back(tenant)  # the request was not taken, so no answer will give it back
                raise
        except Exception as error:
            self.instruments.left(request, error)
            raise
        self._pipeline.refuse(displaced)

    def _plan(self, tenant: Tenant, ticket: Ticket, tokens: int) -> Plan:
        """Returns the plan of the rung that a request asks for, or else the one that the load allows.

        Unsure texts may leave the backbone if the request comes by the model `hplm` and the load allows the dearest plan.
        """
        asked = tenant.plan(ticket.rung) if ticket.rung else None
        lacking = next((level.stack for level in tenant.levels if level.stack not in self._shares), None)
        if tenant.is_cascaded and lacking is not None:
            raise Broken(
                f"tenant {tenant.id!r} has a level on the stack {lacking!r}, which this export does not have or cannot read: "
                "export the repository again"
            )
        allowed = self._line.rung(tenant.uid, tokens, tenant.costs)  # a request that asks for a rung is load too
        if ticket.across == LEAVES and tenant.link is not None and not asked and not allowed:
            return tenant.link.plan
        return asked or tenant.plans[allowed]

    def _leave(self, respond: Callable[[Answer, Counted], None], request: Request, answer: Answer) -> None:
        # The quota is given back before the answer is sent, so that the client's next request is not refused.
        self._quotas.give_back(request.tenant)
        counted: Counted = ()
        try:
            counted = self.instruments.left(request, answer)
        finally:
            respond(answer, counted)

    @staticmethod
    def _check(request: Request, looked_up: LookedUp, top_k: int) -> None:
        tenant = request.tenant
        if top_k and not tenant.task_object.allows_top_k:
            able = " or ".join(task.name for task in TASKS.values() if task.allows_top_k)
            raise InvalidInput(
                f"top_k is for the task {able}, but tenant {tenant.id!r} has the task {tenant.task!r}: leave out top_k"
            )
        widest = int(looked_up.counts.max())
        if looked_up.texts * widest * len(tenant.labels) > MOST_NUMBERS:
            raise InvalidInput(
                f"the answer to {looked_up.texts:,} texts with up to {widest:,} rows of {len(tenant.labels):,} labels would "
                f"have more than {MOST_NUMBERS:,} numbers: send fewer or shorter texts"
            )
        request.view.forest.chain(tenant.domain, tenant.domain_version)  # raises if a table is broken

    @property
    def computing_s(self) -> float:
        """How long the current batch has been computing."""
        return self._pipeline.computing_s

    def look(self) -> None:
        """Updates the instruments."""
        self.instruments.look(self._line, self._stager)

    def close(self) -> None:
        self._watch.close()
        self._pipeline.close(DRAIN_SECONDS)
        self.instruments.close()

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
            if self._locked_rows:
                rows.lock(self._locked_rows)
        except (HplmError, OSError) as error:
            log.error("a new table is served from disk instead of memory: %s", error)

    def _preload(self, rows: StoredRows) -> None:
        """Reads the configured rows into memory. An accelerator gets the hot rows with the first batch that needs them."""
        if self._settings.plot_preload:
            rows.preload()
        elif self._settings.plot_hot:
            rows.preload(self._settings.plot_hot)

    def _lock(self, tables: Sequence[Table]) -> None:
        """Locks the hot rows of all tables, or raises: what was asked to stay in memory must not be read from disk."""
        if not self._locked_rows:
            return
        try:
            for table in tables:
                table.rows.lock(self._locked_rows)
        except InvalidInput as error:
            needed = sum(table.rows.first_bytes(self._locked_rows) for table in tables)
            raise InvalidInput(f"{error}. All {len(tables)} tables together take {needed:,} bytes") from None
