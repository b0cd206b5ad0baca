"""Asks a keeper's engine without a server, as the upper half's model does."""

import threading
import time

from hplm.engine.backbone import Backbone
from hplm.engine.keeper import Asked, Keeper
from hplm.engine.lookup import Lookup
from hplm.metrics.meter import Meter
from hplm.tenants.ticket import Ticket
from tests.engine.asker import PARAMETERS
from tests.support.wait import eventually

WANTED = frozenset({"LABEL", "LOGITS", "VERSION"})


class Client:
    """Asks a keeper, and keeps all answers to each request."""

    def __init__(self, folder, **changes):
        self.backbone, self.meter = Backbone(folder), Meter()
        self.lookup = Lookup(self.backbone)
        self.keeper = Keeper([folder], {"backbone": "toy", **PARAMETERS, **changes}, None, [self.meter])
        self.answers = []
        self._arrived = threading.Condition()

    def ask(self, tenant_id, texts, unsent=None, allowed_s=0.0, sending=lambda: None, id="", defer=lambda: None):
        """`unsent`: the error that is sent instead of the answer. `sending` is called while the answer is sent."""
        view = self.backbone.view
        tenant = view.snapshot.find(tenant_id)
        found_in = view.snapshot.export_number, view.snapshot.generation, tenant.uid, tenant.version
        arrival = time.monotonic_ns()
        ticket = Ticket(*found_in, arrival, arrival + round(allowed_s * 1e9) if allowed_s else 0, 0, 0)
        answers = []

        def respond(answer):
            sending()
            with self._arrived:
                answers.append(answer)
                self._arrived.notify_all()
            return unsent

        signed = ticket.sign(b"secret", self.lookup.resolve(view, tenant, texts).pack())
        self.keeper.submit([Asked(signed, id, WANTED, respond, defer)])
        self.answers.append(answers)
        return answers

    def wait(self, answers):
        with self._arrived:
            assert self._arrived.wait_for(lambda: answers, 300)
        return answers[0]

    def ask_until_served(self, tenant_id, texts):
        said = []

        def served():
            said.append(self.wait(self.ask(tenant_id, texts)))
            return isinstance(said[-1], dict)

        eventually(served)
        return said[-1]

    def close(self):
        self.keeper.close()
        assert all(len(answers) == 1 for answers in self.answers)
