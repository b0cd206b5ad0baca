"""Sends requests to lookup and to the upper half without a server, as their two backends do."""

import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial

from hplm.engine.backbone import Backbone
from hplm.engine.request import EncoderRequest
from hplm.engine.service import EncoderService
from hplm.engine.settings import EncoderSettings
from hplm.engine.stages import Stage
from hplm.lookup.lookup import Lookup
from hplm.request.answers import CONFIDENCE, bits_of
from tests.support.device import DEVICE

PARAMETERS = {
    "device": str(DEVICE), "dtype": "fp32", "threads": "0", "policy": "timely", "admission": "true", "packing": "packed",
    "commit_ms": "earliest", "batch_ms": "0", "batch_tokens": "256", "queue_texts": "4000",
    "queue_mb": "100", "journal": "", "slots": "4", "plot_hot": "0", "plot_preload": "false",
}  # fmt: skip


def stages_of(*ends):
    """Returns stages that end with these layers. They share the cores: a machine may have fewer."""
    firsts = [0, *(end + 1 for end in ends[:-1])]
    return tuple(Stage(first, end, DEVICE) for first, end in zip(firsts, ends, strict=True))


def texts_of(backbone, tenant_id, given, truncate=False, pairs=None):
    """Returns the texts of a request as the line gets them."""
    view, tenant = backbone.view, backbone.view.snapshot.find(tenant_id)
    form = Lookup(backbone).resolve(view, tenant, given, pairs, truncate)
    return EncoderRequest(form, view, tenant, lambda request, answer: None).parts()


class Asker:
    """Looks up and submits requests as the two backends do, and keeps all answers to each request."""

    def __init__(self, folder, state=None, stages=(), **changes):
        settings = replace(EncoderSettings.read({**PARAMETERS, **changes}), stages=stages)
        self.backbone = Backbone(folder, state)
        self.lookup = Lookup(self.backbone)
        self.service = EncoderService(folder, settings, state)
        self.driver = self.service.driven()
        self.answers = []
        self._arrived = threading.Condition()

    def ask(self, tenant_id, texts, pairs=None, truncate=False, confidence=False, **asked):
        """`asked`: what else the head of the form says."""
        view = self.backbone.view
        asked.setdefault("arrival_ns", time.monotonic_ns())
        form = self.lookup.resolve(view, view.snapshot.find(tenant_id), texts, pairs, truncate, **asked)
        with self._arrived:
            number = len(self.answers)
            self.answers.append([])
        form.id, form.wanted = f"request {number}", bits_of({CONFIDENCE}) if confidence else 0
        self.service.submit(form, partial(self.answered, number))
        self.driver.wake()
        return number

    def answered(self, number, answer):
        with self._arrived:
            self.answers[number].append(answer)
            self._arrived.notify_all()

    def wait(self, number):
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.answers[number], 300)
        return self.answers[number][0]

    def close(self):
        self.driver.close(drain_s=300.0)  # however slowly it computes
        self.driver.join()
        self.service.close()
        assert all(len(answers) == 1 for answers in self.answers), Counter(map(len, self.answers))
