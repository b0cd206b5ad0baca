"""Texts that go on, and what is left of them: Eq. 4 and Eq. 5 against values computed by hand."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.levels.calibration import UNKNOWN
from hplm.levels.dispatch import draw, probabilities, reroutes
from hplm.levels.pruning import NO_WORD, kept, kept_of_each, runs_of, without_words

SHARES = st.floats(0, 1, allow_subnormal=False)


def test_the_probability_is_that_of_the_paper():
    # c = 0.9, k = 4: 0.95 is halfway between c and 1, so its norm is 0; 0.975 and 1 have the norms 1/4 and 1/2.
    found = probabilities(np.array([0.95, 0.975, 1.0]), 0.9, 4.0)
    assert found == pytest.approx([0.5, 1 / (1 + np.e), 1 / (1 + np.e**2)])
    assert probabilities(np.array([0.2, 0.9]), 0.9, 4.0).tolist() == [1, 1]
    assert probabilities(np.array([0.91, 0.99]), 0.9, 0.0).tolist() == [0.5, 0.5]  # a flat slope is a coin


def test_every_text_may_have_a_plan_of_its_own():
    cutoffs, slopes, draws = np.array([0.9, 0.7, 0.7, 1.0]), np.array([4.0, 1e9, 1e9, 4.0]), np.array([0.9, 0.5, 0.5, 0.99])
    found = reroutes(np.array([0.8, 0.86, 0.84, 0.8]), cutoffs, slopes, draws)
    assert found.tolist() == [True, False, True, True]  # a slope without end is a hard cut halfway between c and 1


def test_a_cutoff_below_zero_cuts_low_confidences():
    confidences = np.array([UNKNOWN, 0.0, 0.24, 0.26, 0.5])
    assert reroutes(confidences, -0.5, 1e9, 0.5).tolist() == [True, True, True, False, False]


@settings(max_examples=60)
@given(SHARES, st.floats(-1, 1, allow_subnormal=False), st.floats(0, 1e12), st.floats(0, 1, exclude_max=True))
def test_with_a_cutoff_of_one_or_without_a_confidence_all_go_on(confidence, cutoff, slope, drawn):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reroutes(np.array([confidence]), 1.0, slope, drawn).all()
        assert reroutes(np.array([UNKNOWN]), cutoff, slope, drawn).all()
        found = probabilities(np.array([confidence]), cutoff, slope)
    assert 0 < found <= 1 and (confidence > cutoff or found == 1)


def test_a_draw_depends_on_text_version_and_step_alone():
    rows = np.arange(12) * 1000
    assert draw(rows, 3) == draw(rows.copy(), 3)
    assert len({draw(rows, 3), draw(rows, 4), draw(rows, 3, 1), draw(rows[::-1].copy(), 3), draw(rows[:-1], 3)}) == 5


def test_draws_are_uniform_and_those_of_other_versions_and_steps_tell_nothing_about_them():
    texts = [np.array([4, text, 9]) for text in range(20_000)]
    drawn = np.array([[draw(rows, *version) for rows in texts] for version in ((1, 0), (2, 0), (1, 1))])
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = np.array([np.histogram(own, 20, (0, 1))[0] for own in drawn])
    assert np.abs(counts - 1000).max() < 150  # five standard deviations
    assert np.abs(np.corrcoef(drawn) - np.eye(3)).max() < 0.04


# "[CLS] this paper beautiful ##ly written [SEP]": the mean is 2.
IMPORTANCE = np.array([4.0, 0.5, 2.0, 3.0, 0.4, 1.1, 3.0])
WORDS = np.array([NO_WORD, 0, 1, 2, 2, 3, NO_WORD])


@pytest.mark.parametrize(
    "alpha, stay",
    [
        (0.0, [1, 1, 1, 1, 1, 1, 1]),
        (0.2, [1, 1, 1, 1, 1, 1, 1]),
        (0.25, [1, 0, 1, 1, 1, 1, 1]),  # 0.5 is a quarter of the mean, and goes
        (0.6, [1, 0, 1, 1, 1, 0, 1]),  # a word stays whole if one of its tokens is important
        (1.0, [1, 0, 0, 1, 1, 0, 1]),
    ],
)
def test_a_word_goes_with_at_most_alpha_times_the_mean_of_all_tokens(alpha, stay):
    assert kept(IMPORTANCE, WORDS, alpha).astype(int).tolist() == stay


def test_special_tokens_stay_and_a_text_that_would_lose_all_words_loses_none():
    assert kept(np.array([0.0, 1, 1, 1, 1, 1, 0.0]), WORDS, 0.9)[[0, -1]].all()
    assert kept(np.array([9.0, 1, 1, 1, 1, 1, 9.0]), WORDS, 0.9).all()
    assert kept(np.array([1.0, 1.0]), np.array([NO_WORD, NO_WORD]), 0.9).all()
    assert kept(np.array([4.0, 0.0, 2.0, 3.0, 0.0, 1.0, 3.0]), WORDS, 0.0).all()  # not even a word without attention goes


@settings(max_examples=80)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_texts_end_to_end_are_pruned_like_each_alone(lengths, seed):
    rng = np.random.default_rng(seed)
    words = [np.cumsum(rng.integers(0, 2, length)) for length in lengths]
    for own in words:
        own[rng.random(len(own)) < 0.2] = NO_WORD
    importance = [rng.choice([0.0, 0.25, 1.0, 3.0], length) for length in lengths]
    alphas = rng.choice([0.0, 0.5, 0.875, 1.5], len(lengths))
    alone = [kept(*one) for one in zip(importance, words, alphas, strict=True)]
    together = kept_of_each(np.concatenate(importance), np.concatenate(words), alphas, np.array(lengths))
    assert together.tolist() == np.concatenate(alone).tolist()
    for numbers, own, alpha, stay in zip(words, importance, alphas, alone, strict=True):
        for word in set(numbers.tolist()) - {NO_WORD}:
            tokens = numbers == word
            assert len(set(stay[tokens].tolist())) == 1
            assert stay[tokens].all() or (own[tokens] <= alpha * own.mean()).all()


TEXT = "this paper, beautifully  written"
PLACES = np.array([[0, 0], [0, 4], [5, 10], [10, 11], [12, 20], [20, 23], [25, 32], [0, 0]])
OF_TEXT = np.array([NO_WORD, 0, 1, 2, 3, 3, 4, NO_WORD])


def left_of(words, places, text, pair=None, left=()):
    own = np.isin(words, [NO_WORD, *left])
    return without_words(text, pair, runs_of(words[own], places[own]))


def test_neighbouring_words_that_stay_keep_what_stands_between_them():
    assert runs_of(OF_TEXT, PLACES) == [(0, 32)]
    assert left_of(OF_TEXT, PLACES, TEXT, left=[0, 1, 2, 3, 4]) == (TEXT, None)
    assert left_of(OF_TEXT, PLACES, TEXT, left=[1, 2, 4]) == ("paper, written", None)
    assert left_of(OF_TEXT, PLACES, TEXT, left=[3, 4]) == ("beautifully  written", None)
    assert left_of(np.array([0, 1, 2]), np.array([[0, 3], [3, 4], [4, 5]]), "don't", left=[0, 2]) == ("don t", None)
    words, places = np.arange(5), np.array([[0, 1], [2, 3], [3, 4], [5, 6], [7, 8]])  # those of a pair are cut apart
    for left, expected in (([0, 1, 2, 4], ("a b", "c e")), ([1, 2], ("b", "c")), ([4], ("a b", "e")), ([0], ("a", "c d e"))):
        assert left_of(words, places, "a b", "c d e", left) == expected
