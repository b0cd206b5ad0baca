"""Several backbones in one engine: each text is computed by its own, whatever else is in the line."""

from __future__ import annotations

import numpy as np
import pytest

from builder.store.store import TenantFile
from hplm.errors import Draining, InvalidInput
from hplm.metrics import names
from testing.reference import Reference
from testing.toy import CONFIG, TENANTS, WORDS, make_chat, make_toy
from tests.backbones import DEEP
from tests.engine.asker import Asker, stages_of
from tests.support.answers import Comparison
from tests.support.message import mentioning

STAGED = (stages_of(0, CONFIG.upper_layers - 1), stages_of(1, DEEP.upper_layers - 1))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("deep"), DEEP)


@pytest.mark.parametrize(
    "chosen", [{"stages": STAGED, "policy": "das"}, {"packing": "concat"}, {"policy": "fcfs", "slots": "4"}]
)
def test_answers_are_those_of_the_reference_in_any_mixture_also_while_the_engine_drains(toy, deep, chosen):
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


def test_a_decoder_among_them_is_refused(toy, tmp_path):
    chat = make_chat(tmp_path, [TenantFile("writer", 1, "root", 1, "generate", [], 0)])
    with pytest.raises(InvalidInput, match=mentioning("'chat'", "decoder", "'backbones'")):
        Asker(toy.folder, others=[(chat.folder, ())])
