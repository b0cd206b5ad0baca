"""A backbone's upper half as a service: settings in, a running pipeline out, requests checked before they enter it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hplm.adapters.bank import Bank
from hplm.engine.backbone import Backbone
from hplm.engine.engine import Engine, resolve_device, resolve_dtype
from hplm.engine.lookup import PAD
from hplm.engine.pipeline import Pipeline
from hplm.engine.request import Request, Respond, Work
from hplm.engine.staging import Stager
from hplm.errors import HplmError, InvalidInput
from hplm.scheduling.policy import policy
from hplm.scheduling.queue import Queue
from hplm.scheduling.waiting import Capacity
from hplm.tenants.ticket import Ticket

log = logging.getLogger(__name__)
DRAIN_SECONDS = 20.0  # below Triton's own exit timeout of 30


@dataclass(frozen=True)
class Settings:
    device: torch.device
    dtype: torch.dtype
    threads: int
    policy: str
    batch_tokens: int
    queue_texts: int
    slots: int

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> Settings:
        """From the parameters of a `config.pbtxt`."""
        device = resolve_device(parameters["device"])
        return cls(
            device=device,
            dtype=resolve_dtype(parameters["dtype"], device),
            threads=_positive(parameters, "threads", least=0),
            policy=parameters["policy"],
            batch_tokens=_positive(parameters, "batch_tokens"),
            queue_texts=_positive(parameters, "queue_texts"),
            slots=_positive(parameters, "slots", least=2),
        )


class Service:
    def __init__(self, folder: Path, settings: Settings) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._backbone = Backbone(folder)
        self._positions = self._backbone.config.positions
        engine = Engine(self._backbone.upper(), self._backbone.config.heads, settings.device, settings.dtype)
        stager = Stager(self._backbone.forest, self._banks(), settings.slots, settings.device, settings.dtype)
        # Two batches are in flight at most, and both pin their slots.
        capacity = Capacity(settings.batch_tokens, settings.batch_tokens, settings.slots // 2)
        line = Queue(settings.queue_texts, policy(settings.policy), time.monotonic_ns)
        self._pipeline = Pipeline(line, capacity, stager, engine)
        log.info("serving %s on %s in %s", self._backbone.config.name, settings.device, settings.dtype)

    def submit(
        self, ticket: Ticket, addresses: np.ndarray, segments: np.ndarray, spans: np.ndarray, respond: Respond
    ) -> None:
        """Takes a request with a valid ticket, or raises why not; what is taken is answered through `respond`, once."""
        tenant = self._backbone.snapshot.by_uid(ticket.uid)
        if ticket.top_k and tenant.task != "classify":
            raise InvalidInput(f"top_k is for tenants that classify; tenant {tenant.id!r} has the task {tenant.task!r}")
        chain = self._backbone.forest.chain(tenant.domain, tenant.domain_version)
        request = Request(tenant, len(addresses), min(ticket.top_k, len(tenant.labels)), respond)
        works = []
        for i in range(len(addresses)):
            length = _used(addresses[i])
            rows = _used(spans[i, :, 1])
            work = Work(request, i, addresses[i, :length], segments[i, :length], spans[i, :rows])
            if not (
                1 <= length <= self._positions
                and chain.holds(work.addresses)
                and (work.segments < self._backbone.config.segments).all()
                and rows
                and (work.spans[:, 0] < length).all()
            ):
                raise InvalidInput("ROWS, SEGMENTS or SPANS are not what the lookup model made for this ticket")
            works.append(work)
        self._pipeline.submit(request, works, ticket.arrival_ns, ticket.deadline_ns, ticket.priority)

    def close(self) -> None:
        self._pipeline.close(DRAIN_SECONDS)

    def _banks(self) -> dict[str, Bank]:
        """A bank that cannot be opened fails the tenants in it, not the server."""
        banks = {}
        for name in self._backbone.snapshot.banks():
            try:
                banks[name] = self._backbone.bank(name)
            except HplmError as error:
                log.error("%s", error)
        return banks


def _used(row: np.ndarray) -> int:
    """How much of a row is not padding."""
    return int((row != PAD).sum())


def _positive(parameters: Mapping[str, str], name: str, least: int = 1) -> int:
    try:
        value = int(parameters[name])
    except ValueError:
        value = least - 1
    if value < least:
        raise InvalidInput(f"parameter {name!r} is {parameters[name]!r}: a whole number of at least {least}")
    return value
