"""Follows the links of tenants: texts of which one backbone is not sure go on to another one, by the model `hplm`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from backends import replies
from backends.forwarded import Answer, Forwarded, ask, error_of, refusal, timeout_us
from hplm.arrays import Array
from hplm.engine.across import NEEDED, answers_in, joined, onward_of
from hplm.engine.answer import LEVEL, ONWARD, fill
from hplm.errors import Broken, DeadlineMissed, Internal
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.parameters import asked_number
from hplm.tasks import TextAnswer
from hplm.tenants.directory import Directory, MissingTarget
from hplm.tenants.link import Link
from hplm.tenants.snapshot import Tenant
from hplm.tenants.ticket import ACROSS, FROM, TO, Ticket

log = logging.getLogger(__name__)
ASKED = ("LOGITS", LEVEL, "VERSION")  # of the backbone that texts go on to
JOINED, CHANGED = "joined", "changed"  # outcomes; the others are words of errors
KEPT = ("truncate", "hplm_priority")  # parameters of the client that mean the same there


class NotAnswered(Exception):
    """The other backbone does not answer, and the answer in hand is given."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(frozen=True)
class Onward:
    """The texts of a request that go on."""

    forwarded: Forwarded
    link: Link
    ticket: Ticket
    places: list[int]  # their numbers in the request
    texts: list[str]  # all of the request
    pairs: list[str] | None
    before: list[TextAnswer]  # to all of them


class Across:
    """Asks both backbones of a link. Several threads may do so."""

    def __init__(self, directory: Directory, meter: Meter, mark: Callable[[int], Mapping[str, str | int]]) -> None:
        """`mark`: returns the parameters by which a backbone knows a forwarded request, and its arrival."""
        self._directory = directory
        self._meter = meter
        self._mark = mark
        self._said: dict[tuple[str, str], str] = {}  # why the texts of tenants do not go on, so that it is logged once

    def forward(self, forwarded: Forwarded, link: Link) -> Answer:
        """Returns the answer to a request of a tenant that has this link: as a backbone has given it, or new outputs."""
        backbone, inputs = forwarded.backbone, forwarded.request.inputs()
        parameters = {**forwarded.parameters, ACROSS: FROM}
        # Not by the ensemble, which does not give back unsure texts.
        looked_up = ask(forwarded, f"{backbone}-lookup", inputs, ["TICKET"], parameters, forwarded.timeout_us).exec()
        if looked_up.has_error():
            return refusal(looked_up, backbone)
        ticket = looked_up.output_tensors()[0]
        wanted = list({*NEEDED, *forwarded.outputs})
        answer = ask(forwarded, self._directory.upper_of(backbone), [ticket], wanted, {}, forwarded.timeout_us).exec()
        if answer.has_error():
            return refusal(answer, backbone)
        tensors = {tensor.name(): tensor for tensor in answer.output_tensors()}
        places = np.flatnonzero(tensors[ONWARD].as_numpy()[:, 0] != b"").tolist()
        if not places:
            return pb_utils.InferenceResponse([tensors[name] for name in forwarded.outputs])
        outputs = {name: tensor.as_numpy() for name, tensor in tensors.items()}
        onward = Onward(
            forwarded,
            link,
            Ticket.read(ticket.as_numpy().tobytes())[0],
            places,
            replies.texts(forwarded.request, "TEXT"),
            replies.optional_texts(forwarded.request, "TEXT_PAIR"),
            answers_in(outputs, forwarded.found.task_object),
        )
        try:
            answers = self._joined(onward)
            outcome = JOINED
        except NotAnswered as reason:
            answers, outcome = onward.before, reason.outcome
        except (Broken, Internal) as error:  # a failure is answered as a failure, also if an answer is in hand
            self._count(onward, error.word)
            return replies.failure(error)
        self._count(onward, outcome)
        versions = [int(version) for version in outputs["VERSION"][:, 0]] if "VERSION" in outputs else []
        return fill(answers).outputs(forwarded.outputs, versions)

    def _count(self, onward: Onward, outcome: str) -> None:
        where = onward.forwarded.backbone, onward.link.backbone
        self._meter.add(names.ACROSS_TEXTS, len(onward.places), *where, outcome)

    def _joined(self, onward: Onward) -> list[TextAnswer]:
        """Returns the answers to all texts. Raises NotAnswered if the other backbone gives none, and its error if it fails."""
        forwarded, link = onward.forwarded, onward.link
        if (onward.ticket.uid, onward.ticket.version) != (forwarded.found.uid, forwarded.found.version):
            raise NotAnswered(CHANGED)  # the tenant, while the request waited here: it may have another link now, or none
        target = self._target(forwarded, link)
        found = self._asked(onward)
        if any(int(version) != target.version for version in found["VERSION"][:, 0]):
            raise NotAnswered(CHANGED)  # after we had looked
        top_k = asked_number(forwarded.parameters, "top_k", 0, 2**16 - 1)
        answers = list(onward.before)
        for at, logits, level in zip(onward.places, found["LOGITS"], found[LEVEL][:, 0], strict=True):
            text, before = onward.texts[at], answers[at]
            answers[at] = joined(forwarded.found, target, before, logits, int(level), link.weight, text, top_k)
        return answers

    def _target(self, forwarded: Forwarded, link: Link) -> Tenant:
        tenant = forwarded.found
        try:
            target = self._directory.target(link, tenant)
        except MissingTarget as reason:
            if self._said.get((forwarded.backbone, tenant.id)) != str(reason):
                self._said[forwarded.backbone, tenant.id] = str(reason)
                log.warning(
                    "unsure texts of tenant %s of backbone %s do not go on: %s, and the link is for version %d; make it again "
                    "with `hplm cascade across`",
                    tenant.id, forwarded.backbone, reason, link.version,
                )  # fmt: skip
            raise NotAnswered(CHANGED) from None
        self._said.pop((forwarded.backbone, tenant.id), None)
        return target

    def _asked(self, onward: Onward) -> dict[str, Array]:
        """Returns what the other backbone says of the texts that go on."""
        forwarded, link, ticket = onward.forwarded, onward.link, onward.ticket
        try:
            allowed_us = timeout_us(ticket.arrival_ns, ticket.deadline_ns)
        except DeadlineMissed as error:
            raise NotAnswered(error.word) from None
        parameters: dict[str, Any] = {**self._mark(ticket.arrival_ns), ACROSS: TO, "tenant": link.tenant}
        parameters |= {name: forwarded.parameters[name] for name in KEPT if name in forwarded.parameters}
        answer = ask(forwarded, link.backbone, _inputs(onward), list(ASKED), parameters, allowed_us).exec()
        if not answer.has_error():
            return {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}
        error, message = error_of(answer, link.backbone)
        if error in (Broken, Internal):
            log.error(
                "tenant %s of backbone %s: %s", link.tenant, link.backbone, message
            )  # of another tenant than the client's
            raise error(f"backbone {link.backbone!r}, which texts of the request went on to, has failed: its log says why")
        raise NotAnswered(error.word)


def _inputs(onward: Onward) -> list[pb_utils.Tensor]:
    """Returns the texts that go on, without their pruned words."""
    read = [
        onward_of(onward.before[at].onward, onward.texts[at], onward.pairs[at] if onward.pairs is not None else None)
        for at in onward.places
    ]
    inputs = [_strings("TEXT", [text for text, _ in read])]
    if onward.pairs is not None:
        inputs.append(_strings("TEXT_PAIR", [pair or "" for _, pair in read]))
    return inputs


def _strings(name: str, values: Sequence[str]) -> pb_utils.Tensor:
    return replies.tensor(name, np.array([[value.encode()] for value in values], dtype=object))
