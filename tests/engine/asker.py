"""Sends requests to lookup and to the upper half without a server, as their two backends do."""

import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import torch

from hplm.engine.backbone import Backbone
from hplm.engine.lookup import Lookup
from hplm.engine.request import Request
from hplm.engine.service import Service
from hplm.engine.settings import Settings
from hplm.engine.stages import Stage

PARAMETERS = {
    "device": "cpu", "dtype": "fp32", "threads": "0", "policy": "timely", "admission": "true", "packing": "packed",
    "commit_ms": "earliest", "batch_ms": "0", "batch_tokens": "256", "queue_texts": "4000",
    "queue_mb": "100", "journal": "", "slots": "4", "plot_hot": "0", "plot_preload": "false",
}  # fmt: skip


def stages_of(*ends):
    """Returns stages that end with these layers. They share the cores: a machine may have fewer."""
    firsts = [0, *(end + 1 for end in ends[:-1])]
    return tuple(Stage(first, end, torch.device("cpu")) for first, end in zip(firsts, ends, strict=True))


def texts_of(backbone, tenant_id, given, truncate=False, pairs=None):
    """Returns the texts of a request as the line gets them."""
    view, tenant = backbone.view, backbone.view.snapshot.find(tenant_id)
    form = Lookup(backbone).resolve(view, tenant, given, pairs, truncate)
    return Request(form, view, tenant, lambda request, answer: None).texts_from(form)


class Asker:
    """Looks up and submits requests as the two backends do, and keeps all answers to each request."""

    def __init__(self, folder, state=None, stages=(), others=(), **changes):
        """`others`: the folders and stages of more backbones in the same engine."""
        settings = replace(Settings.read({**PARAMETERS, **changes}), stages=stages)
        places = [(folder, settings), *((other, replace(settings, stages=cut)) for other, cut in others)]
        self._backbones = [Backbone(own, state) for own, _ in places]
        self._lookups = [Lookup(backbone) for backbone in self._backbones]
        self.backbone, self.lookup = self._backbones[0], self._lookups[0]
        self.service = Service(places, state)
        self.process = self.service.driven()
        self.answers = []
        self._arrived = threading.Condition()

    def ask(
        self,
        tenant_id,
        texts,
        pairs=None,
        truncate=False,
        deadline_ns=0,
        top_k=0,
        confidence=False,
        rung=0,
        backbone=0,
        to=None,
    ):
        """`to`: the backbone that the form is sent to, if it is another one."""
        view = self._backbones[backbone].view
        tenant = view.snapshot.find(tenant_id)
        asked = {"arrival_ns": time.monotonic_ns(), "deadline_ns": deadline_ns, "top_k": top_k, "rung": rung}
        form = self._lookups[backbone].resolve(view, tenant, texts, pairs, truncate, **asked)
        with self._arrived:
            number = len(self.answers)
            self.answers.append([])
        backbone = backbone if to is None else to
        self.service.submit(form, partial(self.answered, number), f"request {number}", confidence, backbone)
        self.process.wake()
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
        self.process.close(drain_s=300.0)  # however slowly it computes
        self.process.join()
        self.service.close()
        assert all(len(answers) == 1 for answers in self.answers), Counter(map(len, self.answers))
