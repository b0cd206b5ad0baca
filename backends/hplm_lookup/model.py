"""Triton's side of the lookup: takes texts, and returns a signed ticket with all that was found."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import numpy as np

from backends import replies
from backends.replies import InferenceRequest
from hplm.errors import DeadlineMissed, HplmError, InvalidInput
from hplm.lookup.lookup import Lookup, LookupRequest, head_of
from hplm.lookup.service import LookupService
from hplm.lookup.views import RegistryWatcher, Views
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.parameters import deadline_us, request_flag, request_name, request_number, request_timeout_us
from hplm.request.answers import Outputs, bits_named, outputs_for
from hplm.request.form import MOST_RUNG, PROBE, SAYING
from hplm.server.held import HeldBy
from hplm.tenants.arrival import ArrivalClock, Forwarding
from hplm.tenants.authorize import LIST, admit, listed
from hplm.tenants.models import upper_of
from hplm.tenants.quotas import Quotas
from hplm.tenants.secret import SharedSecret


class TritonPythonModel(replies.BackendModel):
    """It takes some milliseconds at most, so that Triton keeps no request back for long and their arrival is known."""

    doing = "lookup"
    defers = False

    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        name = self._parameters["backbone"]
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the other cores are the engine's
        self._views = Views(self._folder, self._state, lambda table: table.index)
        self._watcher = RegistryWatcher(self._views)
        self._quotas = Quotas()
        self._lookup = Lookup(self._views, SharedSecret(name, os.getppid()).value)
        meter, upper = Meter(), HeldBy(upper_of(name))
        self._service = LookupService(self._lookup, meter, self._quotas, ahead=lambda: upper.count).start()
        meter.look = self._look
        self._publish(meter, name)
        self._arrivals = ArrivalClock(Forwarding(os.getppid()))
        self._before: list[float] = []  # seconds from the arrival of each request of this call until now
        self._deadline_us = deadline_us(self._parameters)

    def _well(self, request: InferenceRequest) -> Outputs:
        self._service.check()
        return _ticket(PROBE, 1)

    def _take(
        self, request: InferenceRequest, given: dict[str, Any], sender: replies.Sender, received_ns: int
    ) -> LookupRequest | None:
        view = self._views.view
        if request_flag(given, LIST):
            if (texts := replies.required(replies.inputs_of(request), "TEXT").as_numpy().size) != 1:
                raise InvalidInput(f"parameter {LIST!r} is with {texts} texts: send one, which is not read")
            sender.send_answer(_ticket(SAYING + listed(view.snapshot, given, time.time(), self._views.is_stale), 1))
            return None
        tenant = admit(view.snapshot, given, time.time(), self._views.is_stale)
        arrival_ns = self._arrivals.arrival_ns(given, received_ns)
        self._before.append((received_ns - arrival_ns) / 1e9)
        timeout_us = request_timeout_us(given, request.timeout()) or tenant.deadline_us or self._deadline_us
        deadline_ns = arrival_ns + 1000 * timeout_us if timeout_us else 0
        if 0 < deadline_ns <= received_ns:
            raise DeadlineMissed.after(arrival_ns, deadline_ns)
        self._quotas.spend(tenant)  # upper counts again, over all lookups; a refusal here saves the look-up
        inputs = replies.inputs_of(request)
        texts = replies.texts(inputs, "TEXT")
        head = head_of(
            view,
            tenant,
            # Not `priority`: Triton keeps that parameter for itself and passes it to no Python model.
            request_number(given, "hplm_priority", -(2**31), 2**31 - 1),
            arrival_ns,
            deadline_ns,
            received_ns - arrival_ns,
            request_number(given, "top_k", 0, 2**16 - 1),
            request_number(given, "dimensions", 0, 2**16 - 1),
            outputs_for(tenant.task_object, _named(given.get("outputs", ""))),
            min(request_number(given, "hplm_rung", 0, 2**16 - 1), MOST_RUNG),
        )
        return LookupRequest(
            view,
            tenant,
            texts,
            replies.optional_texts(inputs, "TEXT_PAIR"),
            request_flag(given, "truncate"),
            partial(self._respond, sender, len(texts)),
            sender.defer,
            head,
            request_name(given, "hplm_prefix"),
        )

    def _submit(self, accepted: list[LookupRequest]) -> None:
        """Answers short requests if nobody waits, and the others later."""
        if self._before:
            self._service.meter.observe(names.BEFORE_SECONDS, self._before)
            self._before.clear()
        self._service.submit(accepted)

    def _count(self, word: str) -> None:
        self._service.count(word)

    def _respond(self, sender: replies.Sender, texts: int, found: bytearray | Exception) -> HplmError | None:
        """Sends the form of a request, or the error. Returns the error that was sent instead."""
        if isinstance(found, Exception):
            self.send_error(sender, found)
            return None
        return sender.send_answer(_ticket(found, texts))

    def finalize(self) -> None:
        self._service.close()
        super().finalize()
        self._watcher.close()

    def _look(self) -> None:
        self._service.look()
        if self._views.state is not None:
            self._service.meter.set(names.REGISTRY_AGE_SECONDS, self._views.age)
            self._service.meter.set(names.REGISTRY_GENERATION, self._views.generation)
        for (domain, level), count in self._lookup.tally.take().items():
            self._service.meter.add(names.WINDOWS, count, domain, level)


def _named(given: object) -> int:
    """Returns the outputs that a request names, as bits; 0: none. Triton does not tell the models of an ensemble."""
    if not isinstance(given, str):
        raise InvalidInput(f"parameter 'outputs' is {given!r}: send names of outputs as text, with commas between")
    return bits_named(given) if given else 0


def _ticket(form: bytes | bytearray, texts: int) -> Outputs:
    return {"TICKET": np.ndarray((texts, len(form) // texts), np.uint8, form)}
