"""Tabi's ways on made-up answers, where it is known what each does. `tests/bench/test_commands.py` has the command."""

from __future__ import annotations

import numpy as np
import torch

from bench.cascade_material import Part
from builder.exits.build import DROPS
from builder.exits.thresholds import Answered
from hplm.model.attention import PackedAttention
from research.papers.tabi import Looked, cheapest, ensemble, oracle, several, vote

TEXTS = 1000


def made_up(sharp=(2.0, 6.0, 8.0), seed=0) -> Part:
    """Two exits and the full stack, each surer than the one before, over three labels."""
    rng = np.random.default_rng(seed)
    wanted = rng.integers(0, 3, TEXTS)
    logits = np.array([one * np.eye(3)[wanted] + rng.normal(size=(TEXTS, 3)) * 2 for one in sharp])
    shares = np.exp(logits / 2) / np.exp(logits / 2).sum(axis=2, keepdims=True)
    labels = shares.argmax(axis=2)
    losses = shares[-1].max(axis=1) - shares[-1][np.arange(TEXTS), labels]
    costs = np.array([0.0, 0.5, 1.0])
    return Part(
        Answered(shares[:-1].max(axis=2), labels == labels[-1], losses, costs, 0.01, np.ones(TEXTS)), shares, labels, wanted
    )


def test_each_way_does_what_it_says() -> None:
    choosing, judged = made_up(), made_up(seed=1)
    texts = np.arange(TEXTS)
    ((_, left, _),) = oracle(choosing, judged)
    assert (judged.labels[left, texts] == judged.labels[-1]).all() and left.mean() < 1
    ((_, left, _),) = vote(choosing, judged)
    assert set(left) == {1, 2} and (judged.labels[0] == judged.labels[1])[left == 1].all()
    for (_, left, _), drop in zip(several(choosing, judged), DROPS, strict=True):
        assert 100 * judged.answered.losses_of(left).mean() < drop + 0.5 and len(set(left)) > 1
    works = [judged.answered.costs[left].mean() for _, left, _ in several(choosing, judged)]
    assert works == sorted(works, reverse=True)
    levels = [set(left.tolist()) for _, left, _ in cheapest(choosing, judged)]
    assert all(len(level) == 1 for level in levels) and levels == sorted(levels, key=min, reverse=True)


def test_an_ensemble_weighs_what_helps() -> None:
    choosing, judged = made_up((6.0, 6.0, 6.0)), made_up((6.0, 6.0, 6.0), seed=1)  # as good as each other, with own errors
    *_, (mixed, left, _) = ensemble(choosing, judged)
    texts = np.arange(TEXTS)
    assert (mixed.labels[-1] == judged.wanted_numbers).mean() > judged.right[-1].mean() + 0.02
    assert mixed.right[left, texts].mean() >= judged.right[left, texts].mean()


def test_words_that_are_looked_at_stay() -> None:
    looked = Looked([3, 4], heads=1)
    query, key = torch.ones(7, 4), torch.zeros(7, 4)
    key[2], key[5] = 9.0, 9.0  # all tokens look at the last of the first text, and at the third of the second
    value = torch.randn(7, 4)
    assert torch.allclose(looked(0, query, key, value), PackedAttention([3, 4], 1)(0, query, key, value))
    tokens, lengths = looked.most(0.5)
    assert tokens.tolist() == [0, 2, 3, 5] and lengths == [2, 2]
