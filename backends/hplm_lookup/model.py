"""Triton's side of the lookup: takes texts, and returns a signed ticket with all that was found."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from backends import replies
from hplm.engine.lookup import Lookup, LookupRequest, head_of
from hplm.engine.lookup_service import LookupService
from hplm.engine.views import Views, Watch
from hplm.errors import DeadlineMissed, HplmError, InvalidInput, word_of
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.metrics.publisher import Publisher
from hplm.parameters import asked_flag, asked_number, asked_timeout_us, deadline_us
from hplm.request.answers import Outputs, bits_named
from hplm.request.form import MOST_RUNG, PROBE
from hplm.server.control import REVIVED
from hplm.server.held import Held, HeldBy
from hplm.tenants.arrival import Arrivals, Mark
from hplm.tenants.authorize import admit
from hplm.tenants.models import upper_of
from hplm.tenants.quotas import Quotas
from hplm.tenants.secret import SharedSecret

LONGEST_TIMEOUT_US = 10**12  # longer ones would overflow a deadline in nanoseconds


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = replies.model_parameters(args)
        name = parameters["backbone"]
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the other cores are the engine's
        folder = Path(args["model_repository"]).parent / name / "1"
        self._views = Views(folder, replies.given_state(), lambda table: table.index)
        self._watch = Watch(self._views)
        self._quotas = Quotas()
        self._lookup = Lookup(self._views, SharedSecret(name, os.getppid()).value)
        meter = Meter()
        meter.add(names.MODEL_RESTARTS, int(parameters.get(REVIVED, "0")), args["model_name"])
        upper = HeldBy(upper_of(folder.parent.parent, name))
        self._refusals = replies.Refusals("lookup")
        self._service = LookupService(self._lookup, meter, self._quotas, ahead=lambda: upper.count).start()
        self._publisher = Publisher(pb_utils.MetricFamily, meter, name, before=self._look)
        self._mark = Mark(os.getppid())
        self._arrivals = Arrivals(self._mark)
        self._deadline_us = deadline_us(parameters)
        self._held = Held(args["model_name"])

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse | None]:
        """Returns the tickets of short requests if nobody waits. The others are answered later, once, through their senders.

        It takes some milliseconds at most, so that Triton keeps no request back for long and their arrival is known.
        """
        received = time.monotonic_ns()
        call = replies.Call(requests, self._held)
        taken: list[LookupRequest] = []
        before: list[float] = []  # seconds
        for request, sender in zip(requests, call.senders, strict=True):
            try:
                parameters = replies.taken(request, sender)
                if sender.is_probe:
                    self._service.check()
                    replies.send_outputs(sender, _ticket(PROBE, 1))
                else:
                    taken.append(self._admitted(request, parameters, sender, received, before))
            except Exception as error:
                if not sender.is_probe:
                    self._service.count(word_of(error))
                self._refusals.put(sender, error)
        if before:
            self._service.meter.observe(names.BEFORE_SECONDS, before)
        self._service.submit(taken)
        return call.responses()

    def _admitted(
        self,
        request: pb_utils.InferenceRequest,
        parameters: dict[str, Any],
        sender: replies.Sender,
        received_ns: int,
        before: list[float],
    ) -> LookupRequest:
        """Adds to `before` the seconds from its arrival until now."""
        view = self._views.view
        tenant = admit(view.snapshot, parameters, time.time(), self._views.is_stale)
        arrival_ns = self._arrivals.arrival_ns(parameters, received_ns)
        before.append((received_ns - arrival_ns) / 1e9)
        timeout_us = asked_timeout_us(parameters, request.timeout()) or tenant.deadline_us or self._deadline_us
        deadline_ns = arrival_ns + min(timeout_us, LONGEST_TIMEOUT_US) * 1000 if timeout_us else 0
        if 0 < deadline_ns <= received_ns:
            raise DeadlineMissed.after(arrival_ns, deadline_ns)
        self._quotas.spend(tenant)  # upper counts again, over all lookups; a refusal here saves the look-up
        inputs = replies.inputs_of(request)
        texts = replies.texts(inputs, "TEXT")
        head = head_of(
            view,
            tenant,
            # Not `priority`: Triton keeps that parameter for itself and passes it to no Python model.
            asked_number(parameters, "hplm_priority", -(2**31), 2**31 - 1),
            arrival_ns,
            deadline_ns,
            received_ns - arrival_ns,
            asked_number(parameters, "top_k", 0, 2**16 - 1),
            min(asked_number(parameters, "hplm_rung", 0, 2**16 - 1), MOST_RUNG),
            _outputs(parameters.get("outputs", "")),
        )
        return LookupRequest(
            view,
            tenant,
            texts,
            replies.optional_texts(inputs, "TEXT_PAIR"),
            asked_flag(parameters, "truncate"),
            partial(self._respond, sender, len(texts)),
            sender.defer,
            # A forwarded request keeps a thread of the model `hplm` busy, for which other tenants wait.
            self._mark.is_on(parameters),
            head,
        )

    def _respond(self, sender: replies.Sender, texts: int, found: bytearray | Exception) -> HplmError | None:
        """Sends the form of a request, or the error. Returns the error that was sent instead."""
        if isinstance(found, Exception):
            self._refusals.put(sender, found)
            return None
        return replies.send_outputs(sender, _ticket(found, texts))

    def finalize(self) -> None:
        self._service.close()
        self._refusals.close()
        self._publisher.close()
        self._watch.close()
        self._held.close()

    def _look(self) -> None:
        self._service.look()
        if self._views.state is not None:
            self._service.meter.set(names.REGISTRY_AGE_SECONDS, self._views.age)
        for (domain, level), count in self._lookup.tally.take().items():
            self._service.meter.add(names.WINDOWS, count, domain, level)


def _outputs(given: object) -> int:
    """Returns the outputs that a request wants, as bits; 0: all. Triton does not tell the models of an ensemble."""
    if not isinstance(given, str):
        raise InvalidInput(f"parameter 'outputs' is {given!r}: send names of outputs as text, with commas between")
    return bits_named(given) if given else 0


def _ticket(form: bytes | bytearray, texts: int) -> Outputs:
    return {"TICKET": np.ndarray((texts, len(form) // texts), np.uint8, form)}
