"""Texts are put into packs."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.packed_batches import packed_batches


@settings(max_examples=50)
@given(st.lists(st.integers(1, 120), min_size=1, max_size=300), st.integers(1, 20), st.sampled_from([None, 1, 2]))
def test_every_text_is_in_one_pack_in_the_order_of_a_seed(lengths, most_texts, seed):
    """A text that is longer than the limit has a pack of its own. Other seeds give another order."""
    lengths = np.array(lengths)
    cut, again = (
        list(packed_batches(lengths, most_texts, np.random.default_rng(seed) if seed else None, 100)) for _ in range(2)
    )
    order = np.concatenate(cut)
    assert sorted(order) == list(range(len(lengths))) and (order == np.concatenate(again)).all()
    for pack in cut:
        assert len(pack) <= most_texts and (lengths[pack].sum() <= 100 or len(pack) == 1)
        assert (np.diff(lengths[pack]) >= 0).all()
    other = np.concatenate(list(packed_batches(lengths, most_texts, np.random.default_rng(3), 100)))
    assert len(lengths) < 100 or (other != order).any()
