"""Triton's side of the lookup: texts in; row numbers, spans and a signed ticket out."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from hplm.engine.backbone import Backbone, Watch
from hplm.engine.lookup import Lookup
from hplm.errors import HplmError, InvalidInput, NoTenant, Quota
from hplm.plot.levels import Tally
from hplm.tenants.admission import admit
from hplm.tenants.quotas import Quotas
from hplm.tenants.ticket import SharedSecret, Ticket

SECONDS_BETWEEN_METRICS = 1.0


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = {key: value["string_value"] for key, value in json.loads(args["model_config"])["parameters"].items()}
        name = parameters["backbone"]
        torch.set_num_threads(1)  # tensors are only carried here
        state = os.environ.get("HPLM_STATE")
        folder = Path(args["model_repository"]).parent / name / "1"
        self._backbone = Backbone(folder, Path(state) if state else None, lambda table: table.index)
        self._watch = Watch(self._backbone)
        self._lookup = Lookup(self._backbone)
        self._quotas = Quotas()
        self._tally = Tally()
        self._publishing = threading.Event()  # set to end it
        self._publisher = threading.Thread(target=self._publish, args=(name,), name="metrics", daemon=True)
        self._publisher.start()
        self._secret = SharedSecret(name, os.getppid()).value
        self._deadline_us = round(float(parameters["deadline_ms"]) * 1000)

    def execute(self, requests: list) -> list:
        arrival = time.monotonic_ns()
        return [self._answer(request, arrival) for request in requests]

    def _answer(self, request: pb_utils.InferenceRequest, arrival_ns: int) -> pb_utils.InferenceResponse:
        try:
            return pb_utils.InferenceResponse(self._resolve(request, arrival_ns))
        except InvalidInput as error:
            return _failure(error, pb_utils.TritonError.INVALID_ARG)
        except NoTenant as error:
            return _failure(error, pb_utils.TritonError.NOT_FOUND)
        except Quota as error:
            return _failure(error, pb_utils.TritonError.UNAVAILABLE)
        except HplmError as error:
            return _failure(error, pb_utils.TritonError.INTERNAL)
        except Exception as error:
            pb_utils.Logger.log_error(f"lookup failed: {error!r}")
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"[broken] lookup failed: {error}", pb_utils.TritonError.INTERNAL)
            )

    def _resolve(self, request: pb_utils.InferenceRequest, arrival_ns: int) -> list[pb_utils.Tensor]:
        parameters = json.loads(request.parameters() or "{}")
        view = self._backbone.view
        tenant = admit(view.snapshot, parameters, time.time())
        self._quotas.spend(tenant)  # upper counts all of them; what is refused here already costs nobody a look-up
        texts = _texts(request, "TEXT")
        pairs = _texts(request, "TEXT_PAIR")
        if pairs is not None and len(pairs) != len(texts):
            raise InvalidInput(f"TEXT has {len(texts)} texts and TEXT_PAIR {len(pairs)}: send one pair for each")
        resolved = self._lookup.resolve(view, tenant, texts, pairs, _flag(parameters, "truncate"))
        self._tally.add(tenant.domain, view.forest.chain(tenant.domain, tenant.domain_version), resolved.hits)
        timeout_us = request.timeout() or tenant.deadline_us or self._deadline_us
        ticket = Ticket(
            generation=view.snapshot.generation,
            uid=tenant.uid,
            version=tenant.version,
            arrival_ns=arrival_ns,
            deadline_ns=arrival_ns + timeout_us * 1000 if timeout_us else 0,
            # Not `priority`: Triton keeps that word for itself and hands it to no Python model.
            priority=_whole_number(parameters, "hplm_priority", -(2**31), 2**31 - 1),
            top_k=_whole_number(parameters, "top_k", 0, 2**16 - 1),
        )
        signed = np.frombuffer(ticket.sign(self._secret), dtype=np.uint8)
        tensors = {
            "ROWS": resolved.addresses,
            "SEGMENTS": resolved.segments,
            "SPANS": resolved.spans,
            "TICKET": np.tile(signed, (len(texts), 1)),
        }
        return [
            pb_utils.Tensor.from_dlpack(name, torch.from_numpy(tensor).__dlpack__()) for name, tensor in tensors.items()
        ]

    def finalize(self) -> None:
        self._publishing.set()
        self._publisher.join()
        self._watch.close()

    def _publish(self, backbone: str) -> None:
        """Counters are a round trip each to the server process: they go there once a second, not once a request."""
        family = pb_utils.MetricFamily(
            name="hplm_plot_windows_total",
            description="n-gram windows looked up, by where they were found",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        counters: dict[tuple[str, str], pb_utils.Metric] = {}
        ending = False
        while not ending:
            ending = self._publishing.wait(SECONDS_BETWEEN_METRICS)
            for (domain, level), count in self._tally.take().items():
                if (domain, level) not in counters:
                    labels = {"backbone": backbone, "domain": domain, "level": level}
                    counters[domain, level] = family.Metric(labels=labels)
                counters[domain, level].increment(count)


def _texts(request: pb_utils.InferenceRequest, name: str) -> list[str] | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    texts = []
    for i, raw in enumerate(tensor.as_numpy().reshape(-1)):
        try:
            texts.append(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{name} {i + 1} is not UTF-8 ({error.reason} at byte {error.start})") from None
    return texts


def _flag(parameters: dict, name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidInput(f"parameter {name!r} is {value!r}: send true or false")
    return value


def _whole_number(parameters: dict, name: str, low: int, high: int) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInput(f"parameter {name!r} is {value!r}: send a whole number from {low} to {high}")
    return value


def _failure(error: HplmError, code: int) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(error.wire(), code))
