"""Asks an engine without a server, as the upper half's model does."""

import threading
import time

from hplm.engine.backbone import Backbone
from hplm.engine.encoder_client import EncoderClient, PendingTexts
from hplm.engine.lookup import MOST_CHARACTERS, Lookup, Reading
from hplm.metrics.meter import Meter
from hplm.request.answers import bits_of
from tests.engine.asker import PARAMETERS
from tests.support.wait import eventually

WANTED = bits_of({"LABEL", "LOGITS", "VERSION"})


class Client:
    """Asks an engine, and keeps all answers to each request."""

    def __init__(self, folder, **changes):
        self.backbone, self.meter = Backbone(folder), Meter()
        self.lookup = Lookup(self.backbone, b"secret")
        self.own = EncoderClient([folder], {"backbone": "toy", **PARAMETERS, **changes}, None, [self.meter])
        self.workers = self.own.workers
        self.answers = []
        self._arrived = threading.Condition()

    @property
    def pid(self):
        worker = self.workers.current
        return worker.process.pid if worker is not None else None

    def ask(self, tenant_id, texts, id=""):
        view, answers = self.backbone.view, []
        tenant = view.snapshot.find(tenant_id)

        def respond(answer):
            with self._arrived:
                answers.append(answer)
                self._arrived.notify_all()

        (form,) = self.lookup.read([Reading(view, tenant, texts, arrival_ns=time.monotonic_ns())], MOST_CHARACTERS)
        self.own.submit([PendingTexts(form, id, WANTED, respond, lambda: None)])
        self.answers.append(answers)
        return answers

    def wait(self, answers):
        with self._arrived:
            assert self._arrived.wait_for(lambda: answers, 300)
        return answers[0]

    def counts(self):
        """Returns what was counted since the last call."""
        self.own.outcomes[0].settle()
        return self.meter.take()[0]

    def ask_until_served(self, tenant_id, texts):
        said = []

        def served():
            said.append(self.wait(self.ask(tenant_id, texts)))
            return isinstance(said[-1], dict)

        eventually(served)
        return said[-1]

    def close(self):
        self.own.close()
        assert all(len(answers) == 1 for answers in self.answers)
