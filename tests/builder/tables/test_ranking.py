"""Tables take the most frequent n-grams of each length by itself, wherever their order is cut."""

import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.tables.counting import count_ngrams
from builder.tables.ranking import SHORTER_IN_ROOT, Ranking
from tests.builder.tables.test_counting import corpora, corpus_of, expected_counts, spaces

pytestmark = pytest.mark.slow


def level_of(space, key):
    return max(i for i, mask in enumerate(space.masks) if np.array_equal(np.array(key, dtype=np.uint64) & mask, key))


def expected_order(space, expected, root):
    """Returns the keys by their place in their own level; of two keys at one place, that of the deeper level is first."""
    places = {}
    for level in range(len(space.masks)):
        keys = sorted((key for key in expected if level_of(space, key) == level), key=lambda key: (-expected[key], key))
        weight = len(keys) * (SHORTER_IN_ROOT if root and level else 1)
        places |= {key: (Fraction(2 * number + 1, 2 * weight), -level) for number, key in enumerate(keys)}
    return sorted(places, key=places.__getitem__)


@settings(max_examples=50, deadline=None)
@given(st.data(), spaces, st.booleans(), st.sampled_from([1, 2, 5, 1 << 20]))
def test_keys_come_in_the_order_of_their_places(data, space, root, chunk):
    """So a branch takes one share of each length, and a root more of the shorter ones."""
    documents = data.draw(corpora(space.vocabulary))
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpus_of(Path(folder) / "corpus", documents)
        counts = count_ngrams(corpus, space, Path(folder) / "counts", show_progress=False)
        in_order = [list(key) for key in expected_order(space, expected_counts(space, documents), root)]
        ranking, keep = Ranking(counts, root), data.draw(st.sampled_from([0.0, 0.03, 0.5, 0.98, 1.0]))
        for level, distinct in enumerate(counts.levels):
            here = sum(level_of(space, key) == level for key in in_order[: ranking.number(keep)])
            assert abs(here - min(1, keep * SHORTER_IN_ROOT if root and level else keep) * distinct) <= 1
        number = data.draw(st.integers(0, counts.distinct + 1))
        chunks = list(ranking.keys(number, chunk))
        assert [len(keys) for keys in chunks[:-1]] == [chunk] * (len(chunks) - 1)
        assert [key for keys in chunks for key in keys.tolist()] == in_order[:number]
        for level in range(len(counts.levels)):
            own = sorted(key for key in in_order if level_of(space, key) == level)
            absent = [] if not own or list(space.masks[level]) in own else [[int(word) for word in space.masks[level]]]
            asked = sorted(own + absent)
            places = counts.places(level, np.array(asked, dtype=np.uint64).reshape(-1, space.words), chunk).tolist()
            of_level = [key for key in in_order if level_of(space, key) == level]
            assert places == [of_level.index(key) if key in own else -1 for key in asked]
