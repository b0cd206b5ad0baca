"""Triton's side of the lookup: takes texts, and returns row addresses, spans and a signed ticket."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from backends import replies
from hplm.engine.backbone import Backbone, Watch
from hplm.engine.lookup import Lookup
from hplm.engine.settings import deadline_us
from hplm.errors import Broken, HplmError, InvalidInput
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.metrics.publisher import Publisher
from hplm.plot.levels import Tally
from hplm.tenants.authorize import admit
from hplm.tenants.quotas import Quotas
from hplm.tenants.ticket import SharedSecret, Ticket

PASSED_ON = "passed_on"
LONGEST_TIMEOUT_US = 10**12  # longer ones would overflow a deadline in nanoseconds


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = replies.model_parameters(args)
        name = parameters["backbone"]
        torch.set_num_threads(1)  # nothing is computed here
        folder = Path(args["model_repository"]).parent / name / "1"
        self._backbone = Backbone(folder, replies.state_folder(), lambda table: table.index)
        self._watch = Watch(self._backbone)
        self._lookup = Lookup(self._backbone)
        self._quotas = Quotas()
        self._tally = Tally()
        self._meter = Meter()
        self._publisher = Publisher(pb_utils.MetricFamily, self._meter, name, before=self._count_windows)
        self._secret = SharedSecret(name, os.getppid()).value
        self._deadline_us = deadline_us(parameters)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        arrival = time.monotonic_ns()
        return [self._answer(request, arrival) for request in requests]

    def _answer(self, request: pb_utils.InferenceRequest, arrival_ns: int) -> pb_utils.InferenceResponse:
        start = time.perf_counter()
        try:
            response, outcome = pb_utils.InferenceResponse(self._resolve(request, arrival_ns)), PASSED_ON
        except HplmError as error:
            response, outcome = replies.failure(error), error.word
        except Exception as error:
            response, outcome = replies.failure(error, "lookup"), Broken.word
        self._meter.add(names.LOOKUPS, 1, outcome)
        self._meter.add(names.LOOKUP_SECONDS, time.perf_counter() - start)
        return response

    def _resolve(self, request: pb_utils.InferenceRequest, arrival_ns: int) -> list[pb_utils.Tensor]:
        parameters = replies.request_parameters(request)
        view = self._backbone.view
        tenant = admit(view.snapshot, parameters, time.time())
        self._quotas.spend(tenant)  # upper counts again, over all lookups; a refusal here saves the look-up
        texts = replies.texts(request, "TEXT")
        pairs = replies.optional_texts(request, "TEXT_PAIR")
        if pairs is not None and len(pairs) != len(texts):
            raise InvalidInput(f"TEXT has {len(texts)} texts, but TEXT_PAIR has {len(pairs)}: send one pair for each text")
        # Not `priority`: Triton keeps that parameter for itself and passes it to no Python model.
        priority = _whole_number(parameters, "hplm_priority", -(2**31), 2**31 - 1)
        top_k = _whole_number(parameters, "top_k", 0, 2**16 - 1)
        resolved = self._lookup.resolve(view, tenant, texts, pairs, _flag(parameters, "truncate"))
        self._quotas.charge(tenant, len(texts), resolved.tokens)
        self._tally.add(tenant.domain, view.forest.chain(tenant.domain, tenant.domain_version), resolved.hits)
        timeout_us = min(request.timeout() or tenant.deadline_us or self._deadline_us, LONGEST_TIMEOUT_US)
        ticket = Ticket(
            export=view.snapshot.export_number,
            generation=view.snapshot.generation,
            uid=tenant.uid,
            version=tenant.version,
            arrival_ns=arrival_ns,
            deadline_ns=arrival_ns + timeout_us * 1000 if timeout_us else 0,
            priority=priority,
            top_k=top_k,
        )
        signed = np.frombuffer(ticket.sign(self._secret), dtype=np.uint8)
        tensors = {
            "ROWS": resolved.addresses,
            "SEGMENTS": resolved.segments,
            "SPANS": resolved.spans,
            "TICKET": np.tile(signed, (len(texts), 1)),
        }
        return [replies.tensor(name, values) for name, values in tensors.items()]

    def finalize(self) -> None:
        self._publisher.close()
        self._watch.close()

    def _count_windows(self) -> None:
        for (domain, level), count in self._tally.take().items():
            self._meter.add(names.WINDOWS, count, domain, level)


def _flag(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidInput(f"parameter {name!r} is {value!r}: send true or false")
    return value


def _whole_number(parameters: dict[str, Any], name: str, low: int, high: int) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInput(f"parameter {name!r} is {value!r}: send a whole number from {low} to {high}")
    return value
