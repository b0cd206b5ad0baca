import numpy as np
import torch

from hplm.model.windows import aggregate, fallbacks, windows_of


def test_windows_stop_at_the_ends_of_a_text():
    windows = windows_of(np.array([10, 11, 12, 20]), np.array([3, 1]), 3)
    assert windows.tolist() == [[0, 11, 12], [11, 12, 13], [12, 13, 0], [0, 21, 0]]


def test_token_zero_is_a_token():
    assert windows_of(np.array([0, 0]), np.array([2]), 3).tolist() == [[0, 1, 1], [1, 1, 0]]


def test_a_window_loses_its_outermost_token_first_left_before_right():
    assert fallbacks(3).astype(int).tolist() == [[1, 1, 1], [0, 1, 1], [0, 1, 0]]
    assert fallbacks(5).astype(int).tolist()[1:3] == [[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]]
    assert fallbacks(1).tolist() == [[True]]


def test_aggregate_adds_each_token_s_vectors_in_the_windows_that_cover_it():
    lengths, n = np.array([4, 1, 2]), 3
    vectors = torch.randn(7, n, 5, generator=torch.Generator().manual_seed(0))
    present = torch.from_numpy(windows_of(np.arange(7), lengths, n) != 0)
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
    assert torch.allclose(aggregate(vectors), expected)
