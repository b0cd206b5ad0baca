"""Keys are packed and unpacked exactly, for any window and any vocabulary."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hplm.model.windows import Window
from hplm.plot.keys import KeySpace, first_of_each, order


@given(
    window=st.builds(Window, st.integers(1, 5), st.booleans()),
    vocabulary=st.sampled_from([1, 2, 255, 30_522, 250_000, 2**25 - 1, 2**25, 2**33]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    seed=st.integers(0, 2**20),
)
def test_keys_pack_windows_without_loss(window, vocabulary, lengths, seed):
    space = KeySpace(vocabulary, window)
    tokens = np.random.default_rng(seed).integers(0, vocabulary, sum(lengths))
    windows = window.of(tokens, np.array(lengths))
    keys = space.pack(windows)
    assert (space.unpack(keys) == windows).all()
    assert (space.of(tokens, np.array(lengths)) == keys).all()
    for mask, keep in zip(space.masks, window.levels(), strict=True):
        assert (space.pack(windows * keep) == keys & mask).all()
    sorting = order(keys)
    assert len(first_of_each(keys[sorting])) == len(np.unique(windows, axis=0))
    assert (windows[sorting] == windows[np.lexsort(windows.T[::-1])]).all()


def test_a_five_gram_of_a_large_vocabulary_takes_two_words():
    space = KeySpace(250_000, Window(5))
    assert (space.bits, space.words) == (18, 2)
    assert KeySpace(250_000, Window(3)).words == 1
    last = np.full((1, 5), 250_000)
    assert (space.unpack(space.pack(last)) == last).all()


def test_unigrams_are_the_shortest_forms_of_windows():
    for window in (Window(3), Window(4), Window(3, causal=True)):
        space = KeySpace(7, window)
        alone = window.of(np.arange(7), np.full(7, 1))
        assert (space.unpack(space.unigrams()) == alone).all()
