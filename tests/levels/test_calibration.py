"""Confidences against values computed by hand. Fits: tests/builder/evaluation."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from builder.evaluation.fitting import reliability
from hplm.levels.calibration import BINS, DIRICHLET, INTERVAL, UNKNOWN, Calibration, Evidence, confidences, of_first_row

MAP = Calibration(DIRICHLET, weights=((1.0, 0.5, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 2.0)), bias=(0.0, 0.1, -0.1))
NUMBERS = Calibration(BINS, delta=0.5, edges=(1.0, 2.0), shares=(0.9, 0.5, 0.2))


def test_softmax_and_temperature_give_the_values_of_the_paper():
    row = np.log(np.array([[6.0, 3.0, 1.0]], dtype=np.float32))
    assert Calibration().confidence(of_first_row(row)) == pytest.approx(0.6)  # Eq. 2
    halved = 6**0.5 / (6**0.5 + 3**0.5 + 1)
    assert Calibration(temperature=2.0).confidence(of_first_row(row)) == pytest.approx(halved)  # Eq. 3
    assert Calibration(temperature=0.5).confidence(of_first_row(row)) == pytest.approx(36 / 46)
    both = Evidence(np.log(np.array([[0.5, 0.5], [0.8, 0.2]])), np.array([0, 0]))  # right only if both choices are
    assert Calibration().confidence(both) == pytest.approx(0.4)


def test_a_dirichlet_map_gives_the_probability_of_the_answered_label_even_if_another_one_is_likelier():
    p = np.array([0.6, 0.3, 0.1])
    mapped = np.exp([np.log(0.6) + 0.5 * np.log(0.3), np.log(0.3) + 0.1, 2 * np.log(0.1) - 0.1])
    assert MAP.confidence(of_first_row(np.log(p)[None])) == pytest.approx(mapped[0] / mapped.sum())
    even = Calibration(DIRICHLET, weights=((1.0, 0.0), (0.0, 1.0)), bias=(0.0, np.log(9.0)))
    assert even.confidence(of_first_row(np.log([[0.6, 0.4]]))) == pytest.approx(0.6 / (0.6 + 9 * 0.4))


def test_a_number_has_the_share_of_its_bin_or_is_sure_by_its_interval():
    assert [NUMBERS.confidence(of_first_row(np.array([[at]]))) for at in (-3.0, 1.0, 1.9, 2.0)] == [0.9, 0.5, 0.5, 0.2]
    by_interval = Calibration(INTERVAL, temperature=0.5, delta=1.0)
    for spread, sure in ((0.0, 1 - np.exp(-2)), (-9e9, 1.0), (9e9, 0.0)):
        assert by_interval.confidence(of_first_row(np.array([[3.0, spread]]))) == pytest.approx(sure)


def test_many_texts_at_once_get_what_each_would_get():
    logits = np.random.default_rng(0).normal(0, 3, (40, 3)).astype(np.float32)
    kinds = [None, Calibration(temperature=3.0), MAP, Calibration(temperature=0.2), replace(MAP, bias=(0.3, 0.0, 0.0))]
    calibrations = [kinds[number % 5] for number in range(40)]
    expected = [
        UNKNOWN if one is None else one.confidence(of_first_row(row[None]))
        for one, row in zip(calibrations, logits, strict=True)
    ]
    assert confidences(calibrations, logits) == pytest.approx(expected, abs=1e-9)


def test_the_calibration_error_is_the_mean_distance_over_bins_of_equal_width():
    sure, right = np.array([0.11, 0.11, 0.99, 1.0]), np.array([False, True, True, True])
    bins, error = reliability(sure, right)
    assert [tuple(one.values()) for one in bins] == [(2, pytest.approx(0.11), 0.5), (2, pytest.approx(0.995), 1.0)]
    assert error == pytest.approx((2 * 0.39 + 2 * 0.005) / 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "other"}, {"temperature": 0}, {"temperature": 1e-300}, {"temperature": "1"}, {"temperature": float("nan")},
        {"kind": DIRICHLET, "bias": [0, 0], "weights": [[1, 0], [0]]}, {"kind": BINS, "edges": [2, 1], "shares": [1, 1, 1]},
        {"kind": BINS}, {"weights": 3}, {"more": 1},
    ],
)  # fmt: skip
def test_a_calibration_with_other_numbers_is_refused(wrong):
    with pytest.raises(TypeError):
        Calibration.read({**asdict(Calibration()), **wrong})
