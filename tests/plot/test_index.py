"""Keys are packed exactly, for any window and vocabulary, and the index finds them as a dictionary does."""

from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.model.windows import Window
from hplm.plot.index import Index, write_index
from hplm.plot.keys import KeySpace, first_of_each, order
from testing.reference import windows_of


@given(
    window=st.builds(Window, st.integers(1, 5), st.booleans()),
    vocabulary=st.sampled_from([1, 2, 255, 30_522, 250_000, 2**25 - 1, 2**25, 2**33]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    seed=st.integers(0, 2**20),
)
def test_keys_pack_windows_without_loss(window, vocabulary, lengths, seed):
    space = KeySpace(vocabulary, window)
    tokens = np.random.default_rng(seed).integers(0, vocabulary, sum(lengths))
    windows = windows_of(window, np.split(tokens, np.cumsum(lengths)[:-1]))
    keys = space.pack(windows)
    assert (space.unpack(keys) == windows).all()
    assert (space.of(tokens, np.array(lengths)) == keys).all()
    for mask, keep in zip(space.masks, window.levels(), strict=True):
        assert (space.pack(windows * keep) == keys & mask).all()
    sorting = order(keys)
    assert len(first_of_each(keys[sorting])) == len(np.unique(windows, axis=0))
    assert (windows[sorting] == windows[np.lexsort(windows.T[::-1])]).all()


@settings(max_examples=60)
@given(
    count=st.integers(0, 300),
    words=st.integers(1, 2),
    spread=st.sampled_from([400, 2**20, 2**63]),
    part=st.sampled_from([7, 1 << 22]),
    seed=st.integers(0, 2**20),
)
def test_every_key_is_found_and_nothing_else(tmp_path_factory, count, words, spread, part, seed):
    folder = tmp_path_factory.mktemp("index")
    rng = np.random.default_rng(seed)
    drawn = np.unique(rng.integers(1, spread, (2 * count, words), dtype=np.uint64), axis=0)
    rng.shuffle(drawn)
    keys, others = drawn[:count], drawn[count:]
    with patch.multiple("hplm.plot.index", PART=part, CHUNK=5):
        index = Index(folder, write_index(folder, keys))
    assert index.find(keys).tolist() == list(range(1, len(keys) + 1))
    assert not index.find(others).any()
    assert (index.by_row() == keys).all()


def test_no_bucket_is_long(tmp_path):
    """So a search takes no more time and memory in a larger index."""
    keys = np.random.default_rng(0).permutation(np.arange(1, 100_001, dtype=np.uint64))[:, None]
    assert write_index(tmp_path, keys).longest < 10
