"""Adaptation against a tiny teacher and by masked words: it learns, changes no shared weights, and keeps the best state."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModel

from builder.learning import distil as distillation
from builder.learning import masked
from builder.learning.bodies import WholeBody
from builder.learning.distil import distil
from builder.learning.limits import Budget
from builder.learning.masked import given_head, masked_lesson
from builder.learning.windows import Shrinking, SplitModel, lesson_of
from builder.tables.domain import DomainOptions, UpdateOptions, build_domain, update_domain
from builder.tables.root import RootOptions, build_root
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint, split
from hplm.model.windows import Window
from testing.random_store import random_documents
from testing.reference import windows_of
from tests.builder.checkpoints import VOCABULARY, same, save_bert, weights
from tests.builder.stores import NO_TIME, corpus
from tests.support.device import DEVICE
from tests.support.families import FAMILIES, save_family
from tests.support.learning import by_one_step
from tests.support.message import mentioning

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def documents(checkpoint):
    return random_documents(checkpoint.config, 6000, 12, seed=1)


def run(checkpoint, documents, steps, seed=0, train_upper=True, start=None):
    lower, upper = start or split(checkpoint)
    report = distil(checkpoint, lower, upper, documents, Budget(steps=steps), seed, DEVICE, train_upper=train_upper)
    return lower, upper, report


@pytest.fixture(scope="module")
def adapted(checkpoint, documents):
    return run(checkpoint, documents, steps=40)


@pytest.mark.parametrize("upper", [2, 1])
def test_the_teacher_is_the_original_model_also_if_upper_layers_are_dropped(bert, upper):
    teacher = WholeBody(load_checkpoint(str(bert), lower=2, upper=upper)).eval()
    stock = AutoModel.from_pretrained(bert, add_pooling_layer=False).eval()
    tokens = torch.randint(5, VOCABULARY, (9,), generator=torch.Generator().manual_seed(0))
    found = teacher.taught(tokens, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]), [4, 5])  # at the split, at the end
    for part in (slice(0, 4), slice(4, 9)):
        with torch.no_grad():
            expected = stock(tokens[None, part], output_hidden_states=True).hidden_states
        assert all(torch.allclose(own[part], expected[layer][0], atol=1e-5) for own, layer in zip(found, (2, 4), strict=True))


def test_the_closed_form_and_the_steps_both_reduce_the_error(adapted):
    report = adapted[2]
    fitted, end = report["exams"]
    assert report["at_start"]["at_split"] < fitted["at_split"] < end["at_split"] and fitted["score"] < end["score"]
    assert report["last_loss"] < report["first_loss"]
    assert end["at_split"] > 0.5 and report["steps"] == report["kept_step"] == 40


@pytest.mark.parametrize("family", ["eurobert", "modernbert", "nomic_bert"])
def test_layers_that_turn_learn_likewise(family, tmp_path):
    """Texts are longer than what near layers see."""
    save_family(tmp_path, family, hidden_size=32, num_attention_heads=4, intermediate_size=64)
    made = load_checkpoint(str(tmp_path), lower=2)
    _, _, report = run(made, random_documents(made.config, 3000, 20, seed=1), steps=20)
    fitted, end = report["exams"]
    assert report["at_start"]["at_split"] < fitted["at_split"] < end["at_split"] and fitted["score"] < end["score"]
    assert report["at_start"]["at_end"] < fitted["score"]


def lesson_about(checkpoint, texts):
    teacher = WholeBody(checkpoint).eval().to(DEVICE)
    return lesson_of(Shrinking(checkpoint.config, DEVICE), teacher, texts, np.random.default_rng(0))


def test_positions_beyond_the_longest_document_are_fitted_too(checkpoint, adapted):
    """Documents have 12 tokens, the model reads 40."""
    lower, upper, _ = adapted
    lesson = lesson_about(checkpoint, random_documents(checkpoint.config, 2000, 40, seed=9))
    with torch.no_grad():
        error = (SplitModel(lower, upper).to(DEVICE)(lesson)[0] - lesson.at_split).square().sum(1)
    variance = lesson.at_split.var(0).sum()
    assert error[lesson.positions >= 12].mean() < 0.6 * variance


def test_a_domain_s_lower_layers_learn_on_and_a_frozen_upper_stack_does_not_change_by_a_bit(checkpoint, documents, adapted):
    start = copy.deepcopy(adapted[:2])
    with by_one_step():
        lower, upper, report = run(checkpoint, documents, steps=1, seed=3, train_upper=False, start=start)
    before, after = weights(adapted[0]), weights(lower)
    assert same(weights(upper), weights(adapted[1]))
    assert not torch.equal(before["0.layers.0.qkv.weight"], after["0.layers.0.qkv.weight"])
    assert torch.equal(before["0.words.weight"], after["0.words.weight"])
    assert report["exams"][0]["score"] == pytest.approx(report["at_start"]["at_end"])  # nothing was fitted


def test_distinct_windows_are_computed_once_and_nothing_is_lost(checkpoint, documents):
    lower, upper = split(checkpoint)
    texts = documents[:20]
    lesson = lesson_about(checkpoint, texts)
    assert len(lesson.windows) < lesson.tokens
    whole = windows_of(Window(3), texts)
    shrunk = lesson.windows[lesson.window_of].cpu().numpy()
    kept = shrunk != 0
    assert (shrunk[kept] == whole[kept]).all() and kept[:, 1].all()
    assert not (kept[:, 0] & ~kept[:, 2] & (whole[:, 2] != 0)).any()  # the left neighbour goes first
    with torch.no_grad():
        expected = Window(3).aggregate(lower(torch.from_numpy(shrunk)))
        assert torch.allclose(SplitModel(lower, upper).to(DEVICE).sums(lesson).cpu(), expected, atol=1e-5)


def test_without_steps_only_the_closed_form_is_fitted(checkpoint, documents, adapted, monkeypatch):
    """Of the steps after it, second segments take the first one's. What takes long before the first step has a bar."""
    bars = set()
    monkeypatch.setattr(distillation, "passing_bar", lambda things, title, **_: bars.add(title) or things)
    _, upper, report = run(checkpoint, documents, steps=0)
    assert bars == {"asking the original", "scoring held-out texts"}
    assert report["explained"] == round(report["exams"][0]["score"], 4)
    assert report["steps"] == 0 and report["exams"] == adapted[2]["exams"][:1]
    assert report["exams"][0]["score"] > report["at_start"]["at_end"]
    fitted, moved = (stack.segments.weight.detach() for stack in (upper, adapted[1]))
    assert not torch.allclose(moved[0], fitted[0], atol=1e-4)  # no lesson has a second segment
    assert torch.allclose(moved[1] - moved[0], fitted[1] - fitted[0], atol=1e-6) and (moved[1] != moved[0]).any()


def test_the_seed_chooses_the_held_out_texts_and_one_document_is_too_few(documents):
    first, again, other = (
        [document.tolist() for document in distillation.split_documents(documents, seed)[0]] for seed in (5, 5, 6)
    )
    assert first == again != other
    with pytest.raises(InvalidInput, match=mentioning(1)):
        distillation.split_documents([documents[0], np.array([2, 3], dtype=np.int32)], 0)


def test_words_are_masked_as_bert_masks_them(checkpoint):
    config = checkpoint.config
    documents = random_documents(config, 40_000, 20, seed=2)
    lesson = masked_lesson(Shrinking(config, DEVICE), documents, np.random.default_rng(0))
    words = np.concatenate(documents)
    centres = lesson.windows[lesson.window_of][:, 1].cpu().numpy() - 1
    guessed = np.zeros(len(words), dtype=bool)
    guessed[lesson.guessed.cpu().numpy()] = True
    inner = ~np.isin(words, (config.cls_id, config.sep_id))
    assert not (guessed & ~inner).any() and guessed[inner].mean() == pytest.approx(0.15, abs=0.01)
    assert (lesson.words.cpu().numpy() == words[guessed]).all() and (centres[~guessed] == words[~guessed]).all()
    hidden, same = centres[guessed] == config.mask_id, centres[guessed] == words[guessed]
    assert hidden.mean() == pytest.approx(0.8, abs=0.02) and same.mean() == pytest.approx(0.1, abs=0.02)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_checkpoints_head_is_its_own(family, tmp_path):
    stock = save_family(tmp_path, family, "ForMaskedLM")
    made, seen = load_checkpoint(str(tmp_path)), []
    head = given_head(str(tmp_path), made.config)
    assert (head is None) == (family in ("electra", "eurobert")), "a discriminator has none, and EuroBERT's is a matrix"
    if head is not None:
        stock.base_model.register_forward_hook(lambda _, inputs, outputs: seen.append(outputs[0]))
        wanted = stock(torch.tensor([[0, 5, 6, 2]])).logits.log_softmax(-1)
        assert torch.allclose(head(seen[0], made.weights["words.weight"]).log_softmax(-1), wanted, atol=1e-4)
    save_family(tmp_path, family)
    assert given_head(str(tmp_path), made.config) is None, "it was saved without one"


def report_of(store, branch):
    return json.loads((store.folder / "lower" / f"{branch}.json").read_text())


def test_a_branch_learns_on_from_the_branch_before_it_and_its_head(tmp_path, no_pictures):
    """Takes seconds, because six branches are built. The root learns, and makes a head first; the others take one step."""
    two, domain, model = Budget(steps=2), DomainOptions(min_tokens=1), save_bert(tmp_path / "bert")
    options, text = RootOptions(name="tiny", masked=0.5), [corpus(tmp_path, 0, lines=25)]
    store, _ = build_root(str(model), text, tmp_path / "store", options, Budget(steps=50), DEVICE)
    report = report_of(store, "root-1")
    learned, (start, *exams) = report["masked"], report["masked"]["exams"]
    assert (report["steps"], learned["steps"], learned["head"], learned["head_steps"]) == (25, 20, "made here", 5)
    (kept,) = [exam for exam in exams if exam["step"] == learned["kept_step"]]
    assert kept["loss"] == min(exam["loss"] for exam in exams) < start["loss"] and len(exams) == masked.EXAMS
    with by_one_step():
        build_domain(store, "bio", [corpus(tmp_path, 1, lines=25)], domain, two, DEVICE)
        update_domain(store, "bio", [corpus(tmp_path, 2, lines=25)], UpdateOptions(), two, DEVICE)
        for branch in ("bio-1", "bio-2"):
            report = report_of(store, branch)
            assert (report["learn"], report["head"], report["head_steps"]) == ("masked", "the branch's", 0), branch
        heads = [store.masked_head(*branch) for branch in (("root", 1), ("bio", 1), ("bio", 2))]
        before, after = (store.lower(*branch).state_dict() for branch in (("root", 1), ("bio", 1)))
        assert torch.equal(before["words.weight"], after["words.weight"])
        assert not torch.equal(before["layers.0.qkv.weight"], after["layers.0.qkv.weight"])
        update_domain(store, "bio", text, UpdateOptions(), NO_TIME, DEVICE)  # without learning
        assert all(same(head, store.masked_head("bio", 3)) for head in heads)
        build_domain(store, "law", [corpus(tmp_path, 1, lines=25)], replace(domain, learn="distil"), two, DEVICE)
        assert report_of(store, "law-1")["learn"] == "distil"
        (store.folder / "lower/root-1.head.safetensors").unlink()
        save_bert(model, with_head=True)
        build_domain(store, "art", [corpus(tmp_path, 1, lines=25)], domain, two, DEVICE)
        assert report_of(store, "art-1")["head"] == "the checkpoint's"
    with pytest.raises(InvalidInput, match=mentioning("--learn", "'guess'", "masked", "distil")):
        build_domain(store, "new", [corpus(tmp_path, 1, lines=25)], replace(domain, learn="guess"), two, DEVICE)
