import numpy as np
import pytest
import torch

from hplm.errors import InvalidInput
from hplm.model.windows import Window
from tests.support.message import mentioning


def test_windows_stop_at_the_ends_of_a_text():
    windows = Window(3).of(np.array([10, 11, 12, 20]), np.array([3, 1]))
    assert windows.tolist() == [[0, 11, 12], [11, 12, 13], [12, 13, 0], [0, 21, 0]]


def test_token_zero_is_a_token():
    assert Window(3).of(np.array([0, 0]), np.array([2])).tolist() == [[0, 1, 1], [1, 1, 0]]


def test_a_window_loses_its_outermost_token_first_left_before_right():
    assert Window(3).levels().astype(int).tolist() == [[1, 1, 1], [0, 1, 1], [0, 1, 0]]
    assert Window(5).levels().astype(int).tolist()[1:3] == [[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]]
    assert Window(1).levels().tolist() == [[True]]


def test_aggregate_adds_each_token_s_vectors_in_the_windows_that_cover_it():
    lengths, n = np.array([4, 1, 2]), 3
    vectors = torch.randn(7, n, 5, generator=torch.Generator().manual_seed(0))
    present = torch.from_numpy(Window(n).of(np.arange(7), lengths) != 0)
    vectors = vectors * present.unsqueeze(-1)
    expected = torch.zeros(7, 5)
    start = 0
    for length in lengths:
        for middle in range(length):
            for position in range(n):
                place = middle + position - 1
                if 0 <= place < length:
                    expected[start + place] += vectors[start + middle, position]
        start += length
    assert torch.allclose(Window(n).aggregate(vectors), expected)


def test_an_even_window_has_one_more_token_before_than_after():
    assert Window(4).of(np.array([10, 11, 12]), np.array([3])).tolist() == [[0, 0, 11, 12], [0, 11, 12, 13], [11, 12, 13, 0]]
    assert Window(4).levels().astype(int).tolist() == [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 0]]


def test_a_causal_window_ends_with_its_own_token_and_keeps_one_vector():
    window = Window(3, causal=True)
    windows = window.of(np.array([10, 11, 12, 20]), np.array([3, 1]))
    assert windows.tolist() == [[0, 0, 11], [0, 11, 12], [11, 12, 13], [0, 0, 21]]
    assert window.levels().astype(int).tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    vectors = torch.randn(4, window.vectors, 5)
    assert torch.equal(window.aggregate(vectors), vectors[:, 0])


def test_windows_have_one_to_five_tokens():
    for n in (0, 6):
        with pytest.raises(InvalidInput, match=mentioning(n, 5)):
            Window(n)
