"""The upper half passes requests to the engine within its limits. `test_encoder_machine` tests random runs."""

import time
from collections import defaultdict

import numpy as np
import pytest
import torch

from hplm.engine.backbone import Backbone, own_threads
from hplm.engine.service import TICKET_SECONDS, EncoderService
from hplm.engine.settings import EncoderSettings
from hplm.errors import Draining, NoTenant, QueueFull
from hplm.lookup.lookup import Lookup, LookupRequest
from hplm.model.cpu import apart
from testing.toy import WORDS
from tests.engine.asker import PARAMETERS, Asker, texts_of

pytestmark = pytest.mark.slow


@pytest.fixture
def asker(toy):
    asker = Asker(toy.folder)
    yield asker
    asker.close()


def test_top_k_gives_the_best_labels_first(asker, reference):
    (rows,) = asker.wait(asker.ask("city", [WORDS[3]], top_k=3))
    logits = reference.forward(WORDS[3], "city")[0]
    assert rows.labels == [f"topic-{i}" for i in logits.argsort(descending=True)[:3]]
    assert rows.scores == pytest.approx(logits.softmax(0).sort(descending=True).values[:3].tolist(), abs=1e-4)
    np.testing.assert_allclose(rows.logits, logits[None], atol=1e-3)  # one row for all labels


def test_words_without_a_token_have_their_rows_and_cost_the_engine_nothing(asker, reference):
    text = " ".join([WORDS[0], "\x00 ", *["\u200b"] * 500, f"{WORDS[1]},{WORDS[3]}"])
    given = [text, "\u200b \u200b"], [WORDS[2], WORDS[3]]
    read = [len(one.reading) for one in texts_of(asker.backbone, "beta", given[0], pairs=given[1])]
    assert read == [2, 1]  # two words, and the first token of a text without any
    rows, nothing = asker.wait(asker.ask("beta", *given))
    assert [text[start:stop] for start, stop in rows.spans] == text.split()
    assert len(rows.labels) == 503 and rows.labels[0] and rows.labels[502] and not any(rows.labels[1:502])
    np.testing.assert_allclose(rows.logits, reference.forward(text, "beta", WORDS[2]), atol=1e-3)
    assert nothing.labels == ["", ""] and (nothing.logits == 0).all()


@pytest.mark.parametrize(("cores", "backbones", "threads"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (1, 2, 1)])
def test_an_engine_without_a_number_of_threads_has_its_part_of_the_cores(tmp_path, monkeypatch, cores, backbones, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    folders = [tmp_path / f"b{number}/1" for number in range(backbones)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "tenants.json").touch()
    (tmp_path / "b0-upper/1").mkdir(parents=True)
    assert [own_threads(folder) for folder in folders] == [threads] * backbones


def test_a_number_of_threads_that_is_named_holds_and_0_means_a_part_of_the_cores(toy, monkeypatch):
    monkeypatch.setattr("hplm.engine.service.own_threads", lambda folder: 3 if folder == toy.folder else 0)
    for given, threads in (("0", 3), ("2", 2)):
        settings = EncoderSettings.read({**PARAMETERS, "threads": given})
        service = apart(lambda settings=settings: EncoderService(toy.folder, settings))
        service.close()
        assert service.threads == threads


FRAME = {  # the tenant of each request, its age in seconds, what its head says, and why it is refused
    "too old: it would be a key that nobody can revoke": ("acme", TICKET_SECONDS + 5, {}, QueueFull),  # while there is room
    "good": ("acme", 0, {}, None),
    "nearly too old": ("acme", TICKET_SECONDS - 5, {}, None),
    "of another export, which one model may still have": ("acme", 0, {"export": 1}, Draining),
    "of an unknown tenant": ("acme", 0, {"uid": 999}, NoTenant),
    "cut off": ("acme", 0, {}, ValueError),
    "for which there is no room": ("acme", 0, {}, QueueFull),
}


def test_each_request_of_a_frame_gets_one_answer_whichever_step_refuses_it(toy):
    class Kept(defaultdict):
        """An outbox that keeps the answers to each request."""

        def put(self, number, wanted, version, answer):
            self[number].append(answer)

        def __enter__(self):
            pass

        def __exit__(self, *raised):
            pass

    outbox, backbone = Kept(list), Backbone(toy.folder)
    service = EncoderService(toy.folder, EncoderSettings.read({**PARAMETERS, "queue_texts": "2"}), None, outbox)
    view = backbone.view
    passed, waited_ns = [], 10**12  # at the front door
    for number, (name, (tenant, seconds, changes, _)) in enumerate(FRAME.items()):
        request = LookupRequest(view, view.snapshot.find(tenant), [WORDS[0]])
        arrival = {"arrival_ns": time.monotonic_ns() - seconds * 10**9 - waited_ns, "waited_ns": waited_ns}
        request.head = request.head._replace(**arrival, **changes)
        (form,) = Lookup(backbone).read([request])
        passed.append((number, 1, name, form[:9] if name == "cut off" else form))
    service.take(iter(passed))
    assert len(service.served.quotas) == 1, "a refused request is in flight, or a good one is not"
    service.encoder.compute(service.encoder.prepare())
    for number, (name, (*_, error)) in enumerate(FRAME.items()):
        (answer,) = outbox[number]
        assert type(answer) is error if error else len(answer) == 1, name
    assert not len(service.served.quotas)
    service.close()
