"""Further pretraining: words are masked as BERT masks them, the lower layers alone learn, and the best state is kept."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from builder.learning import masked
from builder.learning.limits import Budget
from builder.learning.masked import MaskedLessons, further_pretrain, given_head
from builder.tables.domain import DomainOptions, UpdateOptions, build_domain, update_domain
from builder.tables.root import RootOptions, build_root
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint, split
from testing.random_store import random_documents
from tests.builder.checkpoints import chained, same, save_bert
from tests.builder.stores import NO_TIME, corpus
from tests.support.device import DEVICE
from tests.support.message import mentioning

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["with head", "without"])
def model(request, tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("model"), request.param == "with head"), request.param == "with head"


def run(checkpoint, documents, budget, head):
    lower, upper = split(checkpoint)
    found = further_pretrain(checkpoint.config, lower, upper, head, "given", documents, budget, 0, DEVICE, show_progress=False)
    return lower, upper, *found


def test_words_are_masked_as_bert_masks_them(checkpoint):
    config = checkpoint.config
    documents = random_documents(config, 40_000, 20, seed=2)
    lesson = MaskedLessons(config, DEVICE).lesson(documents, np.random.default_rng(0))
    words = np.concatenate(documents)
    centres = lesson.windows[lesson.window_of][:, 1].cpu().numpy() - 1
    guessed = np.zeros(len(words), dtype=bool)
    guessed[lesson.guessed.cpu().numpy()] = True
    inner = ~np.isin(words, (config.cls_id, config.sep_id))
    assert not (guessed & ~inner).any() and guessed[inner].mean() == pytest.approx(0.15, abs=0.01)
    assert (lesson.words.cpu().numpy() == words[guessed]).all() and (centres[~guessed] == words[~guessed]).all()
    hidden, same = centres[guessed] == config.mask_id, centres[guessed] == words[guessed]
    assert hidden.mean() == pytest.approx(0.8, abs=0.02) and same.mean() == pytest.approx(0.1, abs=0.02)


def test_the_checkpoints_head_is_its_own(model):
    folder, has_head = model
    checkpoint = load_checkpoint(str(folder))
    head = given_head(str(folder), checkpoint.config)
    assert (head is not None) == has_head
    if has_head:
        stock = AutoModelForMaskedLM.from_pretrained(folder)
        hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            words = checkpoint.weights["embeddings.word_embeddings.weight"]
            assert torch.allclose(head(hidden, words), stock.cls(hidden), atol=1e-5)


def test_predictions_improve_and_only_the_lower_layers_change(model):
    folder, _ = model
    checkpoint = load_checkpoint(str(folder))
    documents = chained(checkpoint.config, 8000, 16, seed=1)
    head = given_head(str(folder), checkpoint.config)
    before_lower, before_upper = (stack.state_dict() for stack in split(checkpoint))
    lower, upper, _, report = run(checkpoint, documents, Budget(steps=30), head)
    lower.cpu(), upper.cpu()
    start, *exams = report["exams"]
    kept = next(exam for exam in exams if exam["step"] == report["kept_step"])
    assert kept["loss"] == min(exam["loss"] for exam in exams) < start["loss"] and len(exams) == masked.EXAMS
    assert (report["head"], report["head_steps"]) == (("given", 0) if head is not None else ("made here", 6))
    assert all(torch.equal(tensor, upper.state_dict()[name]) for name, tensor in before_upper.items())
    assert torch.equal(before_lower["words.weight"], lower.state_dict()["words.weight"])
    assert not torch.equal(before_lower["layers.0.qkv.weight"], lower.state_dict()["layers.0.qkv.weight"])


def report_of(store, branch):
    return json.loads((store.folder / "lower" / f"{branch}.json").read_text())


@pytest.mark.parametrize("model", ["with head"], indirect=True)  # the test of predictions makes one
def test_a_branch_learns_on_from_the_branch_before_it_and_its_head(model, tmp_path):
    """Takes seconds, because six branches learn or are built."""
    two, domain = Budget(steps=2), DomainOptions(min_tokens=1)
    options, text = RootOptions(name="tiny", masked=0.5), [corpus(tmp_path, 0, lines=25)]
    store, _ = build_root(str(model[0]), text, tmp_path / "store", options, Budget(steps=10), DEVICE)
    report = report_of(store, "root-1")
    assert (report["steps"], report["masked"]["steps"], report["masked"]["head"]) == (5, 5, "the checkpoint's")
    build_domain(store, "bio", [corpus(tmp_path, 1, lines=25)], domain, two, DEVICE)
    update_domain(store, "bio", [corpus(tmp_path, 2, lines=25)], UpdateOptions(), two, DEVICE)
    for branch in ("bio-1", "bio-2"):
        report = report_of(store, branch)
        assert (report["learn"], report["head"], report["head_steps"]) == ("masked", "the branch's", 0), branch
    heads = [store.masked_head(*branch) for branch in (("root", 1), ("bio", 1), ("bio", 2))]
    update_domain(store, "bio", text, UpdateOptions(), NO_TIME, DEVICE)  # without learning
    assert all(same(head, store.masked_head("bio", 3)) for head in heads)
    build_domain(store, "law", [corpus(tmp_path, 1, lines=25)], replace(domain, learn="distil"), two, DEVICE)
    assert report_of(store, "law-1")["learn"] == "distil"
    (store.folder / "lower/root-1.head.safetensors").unlink()
    build_domain(store, "art", [corpus(tmp_path, 1, lines=25)], domain, two, DEVICE)
    assert report_of(store, "art-1")["head"] == "the checkpoint's"
    page = (store.folder / "lower" / "bio-2.html").read_text()
    assert "bio version" in page and "data:image/png;base64," in page and "Exams" in page
    with pytest.raises(InvalidInput, match=mentioning("--learn", "'guess'", "masked", "distil")):
        build_domain(store, "new", [corpus(tmp_path, 1, lines=25)], replace(domain, learn="guess"), two, DEVICE)
