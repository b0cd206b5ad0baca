"""Each family of decoders, built from a checkpoint and run by the engine, beside `transformers`."""

from contextlib import closing

import pytest
import torch

from builder.adaptation.learning import Budget
from builder.importing.generative import plain_tenant
from builder.publish.export import write_version
from builder.tables.root import RootOptions, build_root
from hplm.engine.backbone import Backbone
from hplm.generation.sampling import Sampling
from hplm.generation.service import Service, Settings
from hplm.model.prompts import Prompts
from hplm.model.windows import Window
from testing.generative import GenerativeReference
from tests.generation.test_service import Answer
from tests.model.decoders import MADE, drawn, saved, tokens

TENANT, TOKENS = "chat", 24
GREEDY = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True)


@pytest.mark.parametrize("family", MADE)
def test_the_engine_writes_what_transformers_writes(family, tmp_path):
    model = drawn(MADE[family]())
    options = RootOptions(lower=0, window=Window(1))
    store, _ = build_root(
        saved(model, tmp_path / "model"), [], tmp_path / "store", options, Budget(minutes=0), torch.device("cpu")
    )
    plain_tenant(store, TENANT)
    folder = tmp_path / "served" / "1"
    write_version(store, store.tenants(), folder)
    backbone = Backbone(folder)
    texts = Prompts.load(folder / Backbone.TOKENIZER, backbone.config)
    prompts = [tokens(5 + seed, seed) for seed in range(3)]
    answers = [Answer() for _ in prompts]
    with closing(Service(backbone, texts, Settings(cache_tokens=512, seats=4))) as service:
        for prompt, answer in zip(prompts, answers, strict=True):
            service.submit(backbone.view, backbone.view.snapshot.find(TENANT), prompt, GREEDY, answer)
        found = [answer.wait().ids for answer in answers]
    for prompt, ids in zip(prompts, found, strict=True):
        assert len(ids) == TOKENS
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0, len(prompt) :].tolist()
        sure = GenerativeReference(backbone).generate(prompt, TENANT, TOKENS).sure()
        count = min(sure, len(theirs))  # `transformers` stops at the end id
        assert count >= 8 and ids[:count] == theirs[:count]
