"""Word pruning: leaves out words to which the level before paid little attention (Tabi, Eq. 5)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hplm.arrays import Array

NO_WORD = -1  # of special tokens


def kept(importance: Array, words: Array, alpha: float) -> Array:
    """Returns which tokens of one text stay: as `kept_of_each`."""
    return kept_of_each(importance, words, np.array([alpha]), np.array([len(words)]))


def kept_of_each(importance: Array, words: Array, alphas: Array, lengths: Array) -> Array:
    """Returns which tokens stay, of texts that lie end to end.

    `importance` is the attention that each token received. It is used raw: the paper's z-scores have a mean of 0, and no alpha
    would change anything. As in the paper, the mean is over all tokens of a text, including special ones.
    `words` is the number of each token's word in its text, or NO_WORD. A word goes if each of its tokens has `alpha` times the
    mean or less. Special tokens always stay. With an alpha of 0 all tokens stay, and so they do if no word would be left.
    """
    starts = np.cumsum(lengths) - lengths
    text = np.repeat(np.arange(len(lengths)), lengths)
    means = np.add.reduceat(importance.astype(np.float64), starts) / lengths
    important = importance > (alphas * means)[text]
    special = words == NO_WORD
    word = np.where(special, 0, words + text * (int(words.max()) + 1))  # its number among those of all texts
    holding = np.zeros(int(word.max()) + 1, dtype=bool)
    holding[word[important & ~special]] = True
    stay = special | holding[word]
    whole = (alphas == 0) | ~np.logical_or.reduceat(stay & ~special, starts)
    return stay | whole[text]


def runs_of(words: Array, places: Array) -> list[tuple[int, int]]:
    """Returns the code points of words that stay, as beginnings and ends of runs of neighbouring words.

    `words` are numbers of tokens' words, and `places` the code points of these tokens, tokens x 2.
    """
    own = np.flatnonzero(words != NO_WORD)
    numbers, places = words[own], places[own]
    breaks = np.flatnonzero(np.diff(numbers) > 1) + 1
    return [(int(run[:, 0].min()), int(run[:, 1].max())) for run in np.split(places, breaks)]


def without_words(text: str, pair: str | None, runs: Sequence[tuple[int, int]]) -> tuple[str, str | None]:
    """Returns a text and its pair with the words in these runs only, with a space where words were left out.

    Code points of the pair are counted on behind those of the text. A part that would lose all its words loses none.
    """
    ends = len(text), len(text) + len(pair or "")
    left = [_within(own, start, end, runs) for own, start, end in zip((text, pair or ""), (0, len(text)), ends, strict=True)]
    return left[0], left[1] if pair is not None else None


def _within(text: str, start: int, end: int, runs: Sequence[tuple[int, int]]) -> str:
    pieces = [text[max(first, start) - start : last - start] for first, last in runs if first < end and last > start]
    return " ".join(pieces) or text
