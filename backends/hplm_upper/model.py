"""Triton's side of the engine: takes the tickets of looked-up texts, and answers with labels, scores, logits and spans.

The engine is a process of its own. This one keeps the requests, so that every request is answered even if the engine ends.
"""

from __future__ import annotations

import os
from pathlib import Path

import triton_python_backend_utils as pb_utils

from backends import replies
from hplm.engine.client import Pending
from hplm.engine.encoder_client import EncoderClient
from hplm.errors import word_of
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.metrics.publisher import Publisher
from hplm.request.answers import bits_of
from hplm.request.form import PROBE, check, read_head
from hplm.server.control import REVIVED
from hplm.server.held import Held
from hplm.server.inherited import restarts
from hplm.tenants.models import backbones_of
from hplm.tenants.secret import SharedSecret


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = replies.model_parameters(args)
        backbones = backbones_of(parameters)
        meters = {name: Meter() for name in backbones}
        for meter in meters.values():
            meter.add(names.SERVER_RESTARTS, restarts())
            meter.add(names.MODEL_RESTARTS, int(parameters.get(REVIVED, "0")), args["model_name"])
        versions = [Path(args["model_repository"]).parent / name / "1" for name in backbones]
        self._client = EncoderClient(versions, parameters, replies.given_state(), [*meters.values()])
        self._publishers = [
            Publisher(pb_utils.MetricFamily, own.meter, name, before=own.settle, keeps=own.keeps)
            for name, own in zip(backbones, self._client.outcomes, strict=True)
        ]
        self._secrets = [SharedSecret(name, os.getppid()).value for name in backbones]
        self._has_journal = bool(parameters.get("journal"))
        self._held = Held(args["model_name"])

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse | None]:
        """Returns the answers that come within milliseconds. The others are sent later, once, through the requests' senders."""
        call = replies.Call(requests, self._held)
        pending: list[Pending] = []
        for request, sender in zip(requests, call.senders, strict=True):
            try:
                # A copy, before it is checked: Triton frees the memory later, and a client may share it.
                (ticket,) = request.inputs()
                form = ticket.as_numpy().tobytes()
                if form == PROBE:
                    sender.take_for_probe()
                    self._client.workers.check()
                    replies.send_outputs(sender, replies.answer_to_probe(request.requested_output_names()))
                else:
                    backbone, head = check(form, self._secrets), read_head(form)
                    id = replies.request_id(request) if self._has_journal else ""  # nothing else names it
                    # The ensemble asks for all outputs, whatever its client wants.
                    wanted = head.outputs or bits_of(request.requested_output_names())
                    pending.append(Pending(form, sender.answer, sender.defer, id, wanted, backbone, head))
            except Exception as error:
                if not sender.is_probe:  # its domain is not known, and a ticket that nobody has signed has no backbone
                    self._client.outcomes[0].meter.add(names.REQUESTS, 1, "", word_of(error))
                sender.send(replies.failure(error, "taking the request"))
        self._client.submit(pending)
        return call.responses()

    def finalize(self) -> None:
        self._client.close()
        for publisher in self._publishers:
            publisher.close()
        self._held.close()
