"""The upper half of a backbone as a service: builds its encoder from settings, and checks requests before they enter it.

`python -m hplm.engine.service CHANNEL BATCHES` is the engine's process. The model process starts it, and it ends with that one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from hplm.engine.backbone import own_threads
from hplm.engine.encoder import Encoder
from hplm.engine.request import EncoderRequest
from hplm.engine.served import Served
from hplm.engine.settings import EncoderSettings
from hplm.errors import Draining, QueueFull
from hplm.location import Location
from hplm.model.cpu import apart, compute_with
from hplm.process.channel import Apart, Begin, Channel, Passed
from hplm.process.driver import Driver
from hplm.process.host import Host, Outbox, run
from hplm.process.in_flight import InFlight
from hplm.process.suspects import refusal
from hplm.request.answers import AnswersOrError
from hplm.request.form import Form
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Capacity
from hplm.threads import Threads

ANSWERING_NS = 2_000_000  # from the end of computing to the client, through the server
TICKET_SECONDS = 30  # how long a form is valid: it must not outlive a revoked key for long


def scheduler_of(settings: EncoderSettings) -> Scheduler[Any]:
    """Returns the scheduler of an engine with these settings."""
    limits = Limits(settings.queue_texts, settings.queue_bytes)
    return Scheduler(policy(settings.policy), limits, settings.admission, settings.commit_ns, settings.batch_ns, ANSWERING_NS)


def capacity_of(settings: EncoderSettings) -> Capacity:
    """Returns what its batches may hold. All batches in flight pin their slots."""
    in_flight = settings.in_flight
    return Capacity(settings.batch_tokens, settings.batch_tokens, settings.slots // in_flight, in_flight)


class EncoderService:
    def __init__(
        self,
        folder: Path,
        settings: EncoderSettings,
        state: Location | None = None,
        outbox: Outbox | None = None,
        device_failed: Callable[[], None] = lambda: None,
        shown: int = -1,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`folder`: of the backbone's version. `outbox`: takes the answers to what `take` is given. `device_failed` is called
        after a fault of the device that stays, before anybody is told. `shown`: the descriptor of memory that shows what is in
        batches.

        The thread that makes a service should end (`hplm.model.cpu`).
        """
        self.threads = settings.threads or own_threads(folder)  # of the CPU, for the thread that computes
        if settings.stages and not settings.on_accelerator:
            self.threads = 1  # each stage has one core
        compute_with(self.threads)
        scheduler, capacity = scheduler_of(settings), capacity_of(settings)
        self.served = Served(folder, settings, state)
        self.meter = self.served.instruments.meter
        self.meter.look = self._look
        self._refused: frozenset[int] = frozenset()  # uids of tenants
        self._now_ns = now_ns
        self._outbox = outbox
        self._opening: list[float] = []  # when it began to submit a request whose generation was not open
        self._wake: Callable[[], None] = lambda: None
        batches = InFlight(capacity.in_flight, capacity.texts, shown)
        self.encoder = Encoder(scheduler, capacity, self.served, outbox or nullcontext(), device_failed, batches, now_ns)

    def driven(self, channel: Channel | None = None, take_in: Callable[[object], None] = lambda message: None) -> Driver:
        """Starts the threads that drive the encoder."""
        stages = self.served.engine.stages
        on_cpu = stages[0].device.type == "cpu"
        threads = (self.threads, 1) if on_cpu else (1, self.threads)
        starts = [stage.pin for stage in stages]
        if self.served.engine.overlaps:
            starts.append(lambda: None)  # for the thread that waits for batches
        if self._outbox is not None:
            self._unopened = Threads(self._open, "open")
        driver = Driver(self.encoder, threads, channel, take_in, starts, help_at_once=not on_cpu or len(stages) > 1)
        self._wake = driver.wake
        return driver

    def take(self, requests: Iterable[Passed]) -> None:
        """Takes the forms of requests, and answers them through the outbox. It does not raise.

        It does each step for all of them before the next step, whose code would take the place of this one's in the caches.
        """
        assert self._outbox is not None
        read: list[Form] = []
        for number, wanted, id, given in requests:
            try:
                read.append(Form(given, number, wanted, id))
            except Exception as error:
                self._outbox.put(number, wanted, 0, error)
        admitted: list[EncoderRequest] = []
        for form in read:
            respond = partial(self._outbox.put, form.number, form.wanted, form.head.version)
            try:
                if self.served.backbone.is_open(form.head.generation):
                    admitted.append(self._admit(form, respond))
                else:  # to read a snapshot may take long, and others do not wait for it
                    self._unopened.put((form, respond))
            except Exception as error:
                respond(error)
        for request in admitted:
            self._offer(request)

    def _open(self, unopened: tuple[Form, Callable[[AnswersOrError], None]]) -> None:
        self._opening = [time.monotonic()]
        try:
            self.submit(*unopened)
        except Exception as error:
            unopened[1](error)
        finally:
            self._opening = []
        self._wake()

    def busy_since(self) -> list[float]:
        """Returns when it began to read a snapshot that a request names, if it reads one."""
        return self._opening

    def submit(self, form: Form, respond: Callable[[AnswersOrError], None]) -> None:
        """Takes a request, or raises. A request that was taken is answered once, through `respond`."""
        self._offer(self._admit(form, respond))

    def _admit(self, form: Form, respond: Callable[[AnswersOrError], None]) -> EncoderRequest:
        """Returns a request that its tenant may send now, and counts it, or raises."""
        served, head = self.served, form.head
        if head.export != served.backbone.view.snapshot.export_number:
            raise Draining("another export of this backbone is being loaded: send the request again")
        view = served.backbone.at(head.generation)
        tenant = view.snapshot.by_uid(head.uid)
        answered, now = partial(_leave, served, respond), self._now_ns()
        request = EncoderRequest(form, view, tenant, answered, now)
        try:
            if request.tenant.uid in self._refused:
                raise refusal(tenant.id)
            if now - head.received_ns > TICKET_SECONDS * 1_000_000_000:
                raise QueueFull(f"the request waited for more than {TICKET_SECONDS} s before the engine: retry after 1 s")
            served.quotas.take(tenant, form.texts, form.tokens)
        except Exception as error:
            served.instruments.note_answer(request, error)
            raise
        return request

    def _offer(self, request: EncoderRequest) -> None:
        """Brings an admitted request into the line, or answers it with an error."""
        try:
            tenant = request.tenant
            request.view.forest.chain(tenant.domain, tenant.domain_version)  # raises if a table is broken
            costs, asked = tenant.costs, request.head.rung
            # It is load also if it asks for a rung. It gets that, the cheapest if there are fewer, or what the load allows.
            allowed = self.encoder.rung(request.tenant.uid, request.form.tokens, costs)
            request.rung = min(asked, len(costs)) - 1 if asked else allowed
            if request.with_confidence and (team := request.team) is not None:
                request.calibration = team.calibration
            self.encoder.enqueue(request.parts())
        except Exception as error:
            request.fail(error)

    def separate(self, apart: Apart) -> None:
        """Sets which tenants run alone, and which are refused."""
        self.encoder.separate(apart.alone)
        self._refused = apart.refused

    def cancel(self, number: int) -> None:
        """Does nothing: only requests of decoders are cancelled."""

    def _look(self) -> None:
        served = self.served
        served.engine.exit_audit.keep(served.backbone.view.snapshot.tenants)
        served.instruments.look(self.encoder.gauges(), served.stager, served.engine.exit_audit)

    def close(self) -> None:
        """Ends what follows the registry, and the journals. Its requests are answered before."""
        self.served.stop_watching()
        self.served.instruments.close()


def _leave(served: Served, respond: Callable[[AnswersOrError], None], request: EncoderRequest, answer: AnswersOrError) -> None:
    # The quota is given back before the answer is sent, so that the client's next request is not refused.
    served.quotas.give_back(request.tenant)
    try:
        served.instruments.note_answer(request, answer)
    finally:
        respond(answer)


def open_service(begin: Begin, host: Host, service: type[EncoderService] = EncoderService) -> EncoderService:
    settings = EncoderSettings.read(begin.parameters)
    return apart(lambda: service(begin.folder, settings, begin.state, host.outbox, host.device_failed, host.shown))


if __name__ == "__main__":
    run(open_service)
