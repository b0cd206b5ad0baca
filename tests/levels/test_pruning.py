"""Words that stay: Eq. 5 against values computed by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.levels.pruning import NO_WORD, kept, kept_of_each, runs_of, without_words

# "[CLS] this paper beautiful ##ly written [SEP]": the mean is 2.
IMPORTANCE = np.array([4.0, 0.5, 2.0, 3.0, 0.4, 1.1, 3.0])
WORDS = np.array([NO_WORD, 0, 1, 2, 2, 3, NO_WORD])


def words_kept(importance, alpha):
    return sorted(set(WORDS[kept(np.asarray(importance), WORDS, alpha)].tolist()) - {NO_WORD})


def test_a_word_goes_with_at_most_alpha_times_the_mean_of_all_tokens():
    assert words_kept(IMPORTANCE, 0.2) == [0, 1, 2, 3]
    assert words_kept(IMPORTANCE, 0.25) == [1, 2, 3]  # 0.5 is a quarter of the mean, and goes
    assert words_kept(IMPORTANCE, 0.6) == [1, 2]
    assert words_kept(IMPORTANCE, 1.0) == [2]


def test_a_word_stays_whole_if_one_of_its_tokens_is_important():
    assert kept(IMPORTANCE, WORDS, 0.6).tolist() == [True, False, True, True, True, False, True]


def test_special_tokens_stay_however_unimportant():
    assert kept(np.array([0.0, 1, 1, 1, 1, 1, 0.0]), WORDS, 0.9)[[0, -1]].all()


def test_a_text_that_would_lose_all_words_loses_none():
    assert kept(np.array([9.0, 1, 1, 1, 1, 1, 9.0]), WORDS, 0.9).all()
    assert kept(np.array([1.0, 1.0]), np.array([NO_WORD, NO_WORD]), 0.9).all()


def test_an_alpha_of_zero_prunes_nothing_not_even_a_word_without_attention():
    assert kept(np.array([4.0, 0.0, 2.0, 3.0, 0.0, 1.0, 3.0]), WORDS, 0.0).all()


def test_a_word_goes_with_all_its_tokens():
    assert len(np.unique(WORDS[~kept(IMPORTANCE, WORDS, 0.6)])) == 2
    assert kept(IMPORTANCE, WORDS, 0.0).all()
    split = np.array([NO_WORD, 0, 0, 0, 1, 1, NO_WORD])
    assert kept(np.array([4.0, 0.1, 0.1, 0.1, 9, 9, 4]), split, 0.6).tolist() == [True, False, False, False, True, True, True]


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


def test_a_word_between_two_that_stay_leaves_a_space():
    assert left_of(np.array([0, 1, 2]), np.array([[0, 3], [3, 4], [4, 5]]), "don't", left=[0, 2]) == ("don t", None)


def test_text_and_pair_are_cut_apart():
    words, places = np.array([0, 1, 2, 3, 4]), np.array([[0, 1], [2, 3], [3, 4], [5, 6], [7, 8]])
    for left, expected in [
        ([0, 1, 2, 4], ("a b", "c e")),
        ([1, 2], ("b", "c")),
        ([4], ("a b", "e")),  # the text would lose all its words
        ([0], ("a", "c d e")),
    ]:
        assert left_of(words, places, "a b", "c d e", left) == expected
