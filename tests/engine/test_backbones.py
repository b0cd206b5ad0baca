"""Several backbones in one engine: each text is computed by its own, whatever else is in the line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from builder.store.store import TenantFile
from hplm.engine.settings import read_all
from hplm.errors import Draining, InvalidInput
from hplm.metrics import names
from testing.reference import Reference
from testing.toy import CONFIG, TENANTS, WORDS, make_chat, make_toy
from tests.backbones import DEEP
from tests.engine.asker import PARAMETERS, Asker, stages_of
from tests.support.answers import Comparison
from tests.support.message import mentioning

STAGED = (stages_of(0, CONFIG.upper_layers - 1), stages_of(1, DEEP.upper_layers - 1))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("deep"), DEEP)


@pytest.mark.parametrize(
    "chosen", [{"stages": STAGED, "policy": "das"}, {"packing": "concat"}, {"policy": "fcfs", "slots": "4"}]
)
def test_answers_are_those_of_the_reference_in_any_mixture_also_while_the_engine_drains(toy, deep, monkeypatch, chosen):
    monkeypatch.setattr("hplm.engine.process.DRAIN_SECONDS", 300.0)
    first, second = chosen.get("stages", ((), ()))
    both = Asker(toy.folder, others=[(deep.folder, second)], **{"slots": "8", **chosen, "stages": first})
    references = [Reference.open(toy.folder), Reference.open(deep.folder)]
    chance, comparison, asked = np.random.default_rng(0), Comparison(), []
    for _ in range(60):
        backbone, tenant = int(chance.integers(2)), TENANTS[int(chance.integers(len(TENANTS)))].id
        texts = [" ".join(chance.choice(WORDS, int(chance.integers(1, 20)))) for _ in range(int(chance.integers(1, 4)))]
        asked.append((both.ask(tenant, texts, backbone=backbone), backbone, tenant, texts))
    with pytest.raises(Draining):
        both.ask("acme", [WORDS[0]], backbone=0, to=1)
    both.answers.pop()  # the request was refused
    both.close()
    for number, backbone, tenant, texts in asked:
        for text, found in zip(texts, both.wait(number), strict=True):
            expected = references[backbone].forward(text, tenant).numpy()
            comparison.add(f"{backbone} {tenant}", found.logits[: len(expected)], expected)
    comparison.assert_equal("fp32")
    counts = [served.instruments.meter.take()[0] for served in both.service.served]
    computed = [sum(len(texts) for _, backbone, _, texts in asked if backbone == own) for own in (0, 1)]
    assert [own[names.BATCH_TEXTS, ()] for own in counts] == computed


def test_the_settings_of_several_backbones_differ_in_their_stages_alone(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    given = {**PARAMETERS, "backbone": "a", "backbones": "a b", "stages": "0-1@cpu:0 2-3@cpu:1; 0-4@cpu:0 5-5@cpu:1"}
    found = read_all(given)
    assert [[(stage.first, stage.last) for stage in own.stages] for own in found.values()] == [
        [(0, 1), (2, 3)],
        [(0, 4), (5, 5)],
    ]
    assert replace(found["a"], stages=()) == replace(found["b"], stages=())
    assert [own.stages for own in read_all({**given, "stages": ""}).values()] == [(), ()]
    assert list(read_all({**PARAMETERS, "backbone": "a"})) == ["a"]


def test_a_decoder_is_refused_before_any_backbone_is_opened(toy, tmp_path, monkeypatch):
    chat = make_chat(tmp_path, [TenantFile("writer", 1, "root", 1, "generate", [], 0)])
    monkeypatch.setattr("hplm.engine.service.Served", lambda *_: pytest.fail("a backbone was opened"))
    with pytest.raises(InvalidInput, match=mentioning("'chat'", "decoder", "'backbones'")):
        Asker(toy.folder, others=[(chat.folder, ())])
