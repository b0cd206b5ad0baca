"""Confidences against values computed by hand. Fits: tests/builder/evaluation."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from builder.evaluation.fitting import calibration_error
from hplm.calibration import UNKNOWN, Calibration, Evidence, confidences, of_first_row


def test_softmax_and_temperature_give_the_values_of_the_paper():
    row = np.log(np.array([[6.0, 3.0, 1.0]], dtype=np.float32))
    assert Calibration().confidence(of_first_row(row)) == pytest.approx(0.6)  # Eq. 2
    halved = 6**0.5 / (6**0.5 + 3**0.5 + 1)
    assert Calibration(temperature=2.0).confidence(of_first_row(row)) == pytest.approx(halved)  # Eq. 3
    assert Calibration(temperature=0.5).confidence(of_first_row(row)) == pytest.approx(36 / 46)
    both = Evidence(np.log(np.array([[0.5, 0.5], [0.8, 0.2]])), np.array([0, 0]))  # right only if both choices are
    assert Calibration().confidence(both) == pytest.approx(0.4)


def test_many_texts_at_once_get_what_each_would_get():
    logits = np.random.default_rng(0).normal(0, 3, (40, 3)).astype(np.float32)
    kinds = [None, Calibration(temperature=3.0), Calibration(temperature=0.2)]
    calibrations = [kinds[number % 3] for number in range(40)]
    expected = [
        UNKNOWN if one is None else one.confidence(of_first_row(row[None]))
        for one, row in zip(calibrations, logits, strict=True)
    ]
    assert confidences(calibrations, logits) == pytest.approx(expected, abs=1e-9)


def test_the_calibration_error_is_the_mean_distance_over_bins_of_equal_width():
    sure, right = np.array([0.11, 0.11, 0.99, 1.0]), np.array([False, True, True, True])
    assert calibration_error(sure, right) == pytest.approx((2 * 0.39 + 2 * 0.005) / 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "bins"}, {"temperature": 0}, {"temperature": 1e-300}, {"temperature": "1"}, {"temperature": float("nan")},
        {"temperature": float("inf")}, {"temperature": True},
    ],
)  # fmt: skip
def test_a_calibration_with_other_numbers_is_refused(wrong):
    with pytest.raises(TypeError):
        Calibration.read({**asdict(Calibration()), **wrong})
