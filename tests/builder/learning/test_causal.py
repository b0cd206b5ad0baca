"""A decoder's lower layers learn causal windows: from the whole model for a root, from text for a domain."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from builder.evaluation.perplexity import Predicted, Predictor
from builder.importing.adapter_import import plain_tenant
from builder.learning.bodies import WholeBody
from builder.learning.causal import (
    OF_TEXT,
    PIECE,
    NextTokens,
    _pieces,
    causal_lesson,
    learn_windows,
    logs_of,
    predicting,
)
from builder.learning.limits import Budget
from builder.learning.windows import Shrinking
from builder.store import resumable
from builder.tables.domain import DomainOptions, build_domain
from builder.tables.root import RootOptions, build_root
from builder.tasks.examples import Example
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint, split
from hplm.model.windows import Window
from tests.builder.stores import NO_TIME
from tests.model.decoders import MADE, START, drawn, llama, saved, tokens
from tests.support.device import DEVICE
from tests.support.learning import by_one_step
from tests.support.message import mentioning

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "then",
    "it",
    "naps",
    "while",
    "many",
    "birds",
    "sing",
    "in",
    "tall",
    "trees",
]


def sentences(count, seed):
    chance = np.random.default_rng(seed)
    return [" ".join(chance.choice(WORDS, 9)) for _ in range(count)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny decoder, whose weights are small enough to learn from."""
    torch.manual_seed(0)
    return saved(llama(), tmp_path_factory.mktemp("decoder") / "tiny")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(sentences(200, seed=1)), "utf-8")
    return path


def targets(texts):
    return [Example(Path("held.jsonl"), number, "", target=text) for number, text in enumerate(texts, start=1)]


def loaded(model, window=3):
    checkpoint = load_checkpoint(model, lower=2, window=Window(window))
    return checkpoint, *split(checkpoint)


def test_the_gradient_of_next_tokens_is_that_of_their_loss():
    generator = torch.Generator().manual_seed(0)
    read, taught = (torch.randn(600, 8, generator=generator) for _ in range(2))  # more rows than are in memory at a time
    matrix, following = torch.randn(20, 8, generator=generator), torch.randint(20, (600,), generator=generator)
    for wanted in (taught, None):
        own, plain = (read.clone().requires_grad_() for _ in range(2))
        loss = NextTokens.apply(own, matrix, following, wanted)
        expected = cross_entropy(plain @ matrix.T, following)
        if wanted is not None:
            target = (wanted @ matrix.T).log_softmax(1)
            expected = OF_TEXT * expected + (target.exp() * (target - (plain @ matrix.T).log_softmax(1))).sum(1).mean()
        (3 * loss).backward()
        (3 * expected).backward()
        assert torch.allclose(loss, expected, atol=1e-5) and torch.allclose(own.grad, plain.grad, atol=1e-6)


@pytest.mark.parametrize("family", MADE)
def test_the_whole_decoder_says_what_the_library_says(family, tmp_path):
    model = drawn(MADE[family]())
    checkpoint, _, _ = loaded(saved(model, tmp_path / "m"))
    texts = [np.array(tokens(7)), np.array(tokens(5, seed=1)), np.array(tokens(7, seed=2))]
    lengths = np.array([len(text) for text in texts])
    packed, rows = torch.from_numpy(np.concatenate(texts)), torch.from_numpy(predicting(lengths))
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    _, read = WholeBody(checkpoint).taught(packed, positions, lengths.tolist(), rows)
    with torch.no_grad():
        expected = torch.cat([model(torch.from_numpy(text)[None]).logits[0, :-1].log_softmax(1) for text in texts])
    assert torch.allclose(logs_of(read, checkpoint.weights["next_token.weight"]), expected, atol=1e-3)


def test_parts_of_the_whole_decoder_are_the_layers_below_and_above_the_split(tmp_path):
    checkpoint, _, _ = loaded(saved(drawn(llama()), tmp_path / "m"))
    body = WholeBody(checkpoint)
    every, lower, upper = ([*body.part(name)] for name in ("all", "lower", "upper"))
    assert lower and [*map(id, lower), *map(id, upper)] == [*map(id, every)]
    assert [*map(id, upper)] == [*map(id, body.upper_layers.parameters())]


def test_a_root_learns_windows(tiny, corpus, tmp_path):
    options = RootOptions(lower=2, window=Window(2))
    store, _ = build_root(tiny, [corpus], tmp_path / "store", options, Budget(steps=40), DEVICE)
    report = store.learning("root", 1)
    learned = json.loads(report.read_text("utf-8"))
    assert learned["perplexity"]["kept"] < learned["perplexity"]["start"] and learned["steps_at_split"] == 10
    assert learned["kept_step"] > 0 and report.with_suffix(".png").exists()
    plain, _ = build_root(tiny, [corpus], tmp_path / "plain", options, NO_TIME, DEVICE)
    shares = []
    for one in (store, plain):
        plain_tenant(one, "base")
        predictor = Predictor(one, one.known_tenant("base"), targets(sentences(30, seed=2)), DEVICE)
        own = predictor.by_tenant()
        assert (
            own.tokens.sum() == sum(len(text.targets) for text in predictor.texts.texts)
            and predictor.texts.window_shares[0] > 0
        )
        shares.append(own.over(predictor.by_original())[0])
    assert shares[0] < shares[1]


def test_perplexity_over_another_has_an_error_by_document():
    one, other = (Predicted(np.array(losses), np.array([2, 4])) for losses in ([3.0, 6.0], [1.0, 2.0]))
    share, error = one.over(other)
    assert one.perplexity == pytest.approx(math.exp(1.5)) and share == pytest.approx(math.e)
    assert error == pytest.approx(0)  # each token of both documents loses as much


@pytest.mark.parametrize("at", [2, 6])
def test_an_interrupted_training_ends_the_same(tiny, tmp_path, monkeypatch, at):
    """It has eight steps, of which the first two learn the states at the split."""
    documents, weights = [np.array(tokens(20, seed)) for seed in range(40)], []
    monkeypatch.setattr(resumable, "SECONDS_BETWEEN", 0.0)
    for saved_at in (None, tmp_path / "learning.pt"):
        if saved_at is not None:
            calls = iter(range(at))

            def cut(*given, calls=calls, **named):
                if next(calls, None) is None:
                    raise KeyboardInterrupt
                return causal_lesson(*given, **named)

            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr("builder.learning.causal.causal_lesson", cut)
                checkpoint, lower, upper = loaded(tiny)
                learn_windows(checkpoint, checkpoint.config, lower, upper, documents, Budget(steps=8), 0, DEVICE, saved_at)
            assert list(tmp_path.iterdir())
        checkpoint, lower, upper = loaded(tiny)
        learn_windows(checkpoint, checkpoint.config, lower, upper, documents, Budget(steps=8), 0, DEVICE, saved_at)
        weights.append([*lower.state_dict().values(), *upper.state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_only_the_first_upper_layers_learn_for_a_root_and_none_for_a_domain(tiny, corpus):
    checkpoint, lower, upper = loaded(tiny)
    documents = [np.array(tokens(20, seed)) for seed in range(20)]
    before = {name: own.clone() for name, own in upper.state_dict().items()}
    with by_one_step():
        learn_windows(None, checkpoint.config, lower, upper, documents, Budget(steps=2), 0, DEVICE)
    assert all(torch.equal(own.cpu(), before[name]) for name, own in upper.state_dict().items())
    with by_one_step():
        learn_windows(checkpoint, checkpoint.config, lower, upper, documents, Budget(steps=8), 0, DEVICE)
    changed = {name for name, own in upper.state_dict().items() if not torch.equal(own.cpu(), before[name])}
    assert changed and all(name.startswith("layers.") for name in changed)


def test_a_domain_learns_its_next_tokens(tiny, corpus, tmp_path):
    store, _ = build_root(tiny, [corpus], tmp_path / "store", RootOptions(lower=2, window=Window(2)), NO_TIME, DEVICE)
    (other := tmp_path / "other.txt").write_text("\n".join(["abcabcabcabc"] * 50 + ["abc abc"] * 50), "utf-8")
    build_domain(store, "abc", [other], DomainOptions(min_tokens=1), Budget(steps=30), DEVICE)
    held, found = targets(["abcabcabc", "abc abc"]), []
    for name in ("root", "abc"):
        found.append(Predictor(store, plain_tenant(store, f"of-{name}", name), held, DEVICE).by_tenant().perplexity)
    assert found[1] < found[0]
    for options in (DomainOptions(min_tokens=1, learn="masked"), DomainOptions(min_tokens=1, learn="distil")):
        with pytest.raises(InvalidInput, match=mentioning("--learn", "decoder", "next")):
            build_domain(store, "xyz", [other], options, Budget(steps=1), DEVICE)


def test_a_decoder_guesses_no_masked_words(tiny, corpus, tmp_path):
    options = RootOptions(lower=2, window=Window(2), masked=0.5)
    with pytest.raises(InvalidInput, match=mentioning("--masked", "decoder")):
        build_root(tiny, [corpus], tmp_path / "store", options, Budget(steps=1), DEVICE)


def test_a_lesson_asks_for_the_token_behind_each_one_of_the_same_text(tiny):
    windows, texts = Shrinking(loaded(tiny)[0].config, DEVICE), [np.array([START, 1, 2]), np.array([START, 3])]
    lesson = causal_lesson(windows, None, texts, np.random.default_rng(0))
    assert (lesson.before.tolist(), lesson.following.tolist()) == ([0, 1, 3], [1, 2, 3])


def test_long_documents_are_learned_in_pieces():
    long, short = np.arange(2 * PIECE + 100), np.array([0, 7])
    pieces = _pieces([long, short])
    assert [len(piece) for piece in pieces] == [PIECE, PIECE, 102, 2] and all(piece[0] == 0 for piece in pieces)
    assert np.concatenate([piece[1:] for piece in pieces[:3]]).tolist() == long[1:].tolist()
