"""Packs contain every text once, put similar lengths together, and keep their limits."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.packed_batches import packed_batches, positions_of


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=300), st.integers(1, 20), st.booleans())
def test_every_text_is_in_one_pack(lengths, most_texts, shuffled):
    lengths = np.array(lengths)
    cut = list(packed_batches(lengths, 100, most_texts, np.random.default_rng(1) if shuffled else None))
    assert sorted(np.concatenate(cut).tolist()) == list(range(len(lengths)))
    for pack in cut:
        assert len(pack) <= most_texts
        assert lengths[pack].sum() <= 100
        assert (np.diff(lengths[pack]) >= 0).all()


def test_a_text_longer_than_the_limit_has_a_pack_of_its_own():
    assert [pack.tolist() for pack in packed_batches(np.array([5, 500, 6]), 100, 10)] == [[0, 2], [1]]


def test_only_the_random_generator_decides_the_order():
    lengths = np.arange(1, 200) % 17 + 1
    orders = [np.concatenate(list(packed_batches(lengths, 64, 8, np.random.default_rng(seed)))).tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_positions_start_again_in_each_text():
    assert positions_of(np.array([3, 1, 2])).tolist() == [0, 1, 2, 0, 0, 1]
