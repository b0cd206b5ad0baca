"""Triton's side of the engine: takes the tickets of looked-up texts, and answers with labels, scores, logits and spans.

The engine is a process of its own. This one keeps the requests, so that every request is answered even if the engine ends.
"""

from __future__ import annotations

import os

from backends import replies
from backends.replies import InferenceRequest
from hplm.engine.encoder_client import EncoderClient
from hplm.errors import RESEND
from hplm.metrics import names
from hplm.metrics.meter import Outcomes
from hplm.process.client import Pending
from hplm.request.answers import Outputs
from hplm.request.form import PROBE, SAYING, check, read_head
from hplm.server.inherited import restarts
from hplm.tenants.models import backbone_of
from hplm.tenants.secret import SharedSecret

_RESENDS = f'"{RESEND}":'


class TritonPythonModel(replies.BackendModel):
    defers = False

    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        name = backbone_of(self._parameters)
        self._meter = Outcomes()
        self._meter.add(names.SERVER_RESTARTS, restarts())
        self._client = EncoderClient(self._folder, self._parameters, self._state, self._meter)
        self._publish(self._meter, name)
        self._secret = SharedSecret(name, os.getppid()).value
        self._has_journal = bool(self._parameters.get("journal"))

    def _read(self, request: InferenceRequest, sender: replies.Sender) -> bytes:
        # A copy, before it is checked: Triton frees the memory later, and a client may share it.
        (ticket,) = request.inputs()
        form = ticket.as_numpy().tobytes()
        if form == PROBE:
            sender.take_for_probe()
        # Not parsed: JSON has quotation marks inside texts only behind a backslash.
        sender.resends = _RESENDS in (request.parameters() or "")
        return form

    def _well(self, request: InferenceRequest) -> Outputs:
        self._client.workers.check()
        return super()._well(request)

    def _take(self, request: InferenceRequest, given: bytes, sender: replies.Sender, received_ns: int) -> Pending | None:
        if given.startswith(SAYING):
            text = given.removeprefix(SAYING).decode(errors="replace")
            sender.send_answer(replies.saying(text, request))
            return None
        check(given, self._secret)
        head = read_head(given)
        id = replies.request_id(request) if self._has_journal else ""  # nothing else names it
        return Pending(given, sender.send_answer, sender.defer, id, head.outputs, head)

    def _submit(self, accepted: list[Pending]) -> None:
        self._client.submit(accepted)

    def _count(self, word: str) -> None:
        # Its domain is not known.
        self._meter.add(names.REQUESTS, 1, "", word)

    def finalize(self) -> None:
        self._client.close()
        super().finalize()
