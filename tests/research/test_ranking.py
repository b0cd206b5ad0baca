"""The comparison of rankings ranks n-grams as the builder does, and counts what they cover."""

import random

import numpy as np
import pytest

from builder.tables.counts import Counts
from builder.tables.ranking import Ranking
from demo.data import DemoTenant
from research.ranking import Ngrams, Text, unread_lines
from tests.builder.tables.test_domain import rooted
from tests.builder.tables.test_ranking import text_counts
from tests.builder.training.small_tenants import classified, write

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("root", [False, True])
def test_n_grams_are_ranked_as_by_the_builder(tmp_path, root):
    counts = text_counts(tmp_path, 3000)
    ngrams, ranking = Ngrams(counts), Ranking(counts, root)
    expected = np.concatenate(list(ranking.keys(counts.distinct)))
    assert (ngrams.keys[ngrams.apart(ranking.shorter)] == expected).all()
    assert ngrams.covered(ngrams.together) == pytest.approx(1)
    assert ngrams.covered(ngrams.together[:0]) == 0


def test_windows_found_whole_explain_everything(tmp_path):
    store, rng = rooted(tmp_path), random.Random(0)
    file = write(tmp_path / "texts.jsonl", [classified(rng) for _ in range(20)])
    text = Text(store, [DemoTenant("toy", "root", "classify", "?", (), train=file, dev=file, test=file, majority_share=0.5)])
    explained = [text.explained(np.full(len(text.tokens), level)) for level in range(3)]
    assert explained[0] == pytest.approx(1) and explained[0] > explained[1] > explained[2]
    rows = [line.strip("| ").split(" | ") for line in unread_lines(Ngrams(Counts(store.counts_folder("root", 1))), text)][2:]
    for row in rows:
        assert sum(float(share.rstrip("%")) for share in row[2:5]) == pytest.approx(100, abs=0.2)
        assert row[1] != "whole windows alone" or row[3] == "0.0%"
