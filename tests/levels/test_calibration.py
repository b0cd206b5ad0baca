"""Confidences against values computed by hand, and what a fit makes of logits whose truth is known."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from builder.evaluation.fitting import Cases, fit_temperature, fitted
from builder.evaluation.reliability import Bin, bins_of, calibration_error, debiased_error
from hplm.levels.calibration import BINS, DIRICHLET, UNKNOWN, Calibration, confidences
from hplm.levels.evidence import Evidence, of_first_row

MAP = Calibration(DIRICHLET, weights=((1.0, 0.5, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 2.0)), bias=(0.0, 0.1, -0.1))
NUMBERS = Calibration(BINS, delta=0.5, edges=(1.0, 2.0), shares=(0.9, 0.5, 0.2))


def drawn(texts, classes, temperature, seed=0, bias=0.0):
    """Returns texts whose classes follow softmax(logits / temperature), with `bias` for the first class."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (texts, classes))
    scaled = np.exp((logits + bias * (np.arange(classes) == 0)) / temperature)
    classes_of = (rng.random((texts, 1)) > np.cumsum(scaled / scaled.sum(1, keepdims=True), 1)).sum(1)
    return cases_of(logits, classes_of)


def cases_of(logits, classes):
    evidence = [of_first_row(row[None]) for row in logits]
    return Cases.of(evidence, [int(one.chosen[0]) == wanted for one, wanted in zip(evidence, classes, strict=True)], classes)


def error_of(confidences, cases):
    return calibration_error(bins_of(confidences, cases.right))


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


def test_a_number_has_the_share_of_its_bin():
    assert [NUMBERS.confidence(of_first_row(np.array([[at]]))) for at in (-3.0, 1.0, 1.9, 2.0)] == [0.9, 0.5, 0.5, 0.2]


def test_many_texts_at_once_get_what_each_would_get():
    logits = np.random.default_rng(0).normal(0, 3, (40, 3)).astype(np.float32)
    kinds = [None, Calibration(temperature=3.0), MAP, Calibration(temperature=0.2), replace(MAP, bias=(0.3, 0.0, 0.0))]
    calibrations = [kinds[number % 5] for number in range(40)]
    expected = [
        UNKNOWN if one is None else one.confidence(of_first_row(row[None]))
        for one, row in zip(calibrations, logits, strict=True)
    ]
    assert confidences(calibrations, logits) == pytest.approx(expected, abs=1e-9)


def test_a_dirichlet_map_is_chosen_where_one_class_is_answered_too_seldom():
    cases = drawn(3000, 4, temperature=2.0, bias=6.0)
    found = fitted(cases)
    one_temperature = cases.losses(fit_temperature(cases)).mean()
    assert found.calibration.kind == DIRICHLET and found.losses.mean() < 0.9 * one_temperature
    assert error_of(found.confidences, cases) < 0.05
    even = fitted(drawn(3000, 40, temperature=2.0))  # a map of so many classes would be large
    assert even.calibration.kind == "temperature"
    assert fitted(drawn(80, 8, temperature=2.0)).calibration.kind == "temperature"  # a map would learn so few by heart


def test_the_calibration_error_is_the_mean_distance_over_bins_of_equal_width():
    sure, right = np.array([0.11, 0.11, 0.99, 1.0]), np.array([False, True, True, True])
    bins = bins_of(sure, right)
    assert bins == [Bin(2, pytest.approx(0.11), 0.5), Bin(2, pytest.approx(0.995), 1.0)]
    assert calibration_error(bins) == pytest.approx((2 * 0.39 + 2 * 0.005) / 4)


def test_the_debiased_error_is_freed_of_chance():
    """True confidences have an error of 0 on average, and others theirs. The plain one is far above it."""
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(200):
        sure = rng.uniform(0.5, 1, 300)
        right = rng.random((2, 300)) < np.stack([sure, sure - 0.1])
        errors.append(
            [debiased_error(sure, right[0]), debiased_error(sure, right[1]), calibration_error(bins_of(sure, right[0]))]
        )
    true, off, plain = np.mean(errors, axis=0)
    assert true == pytest.approx(0, abs=3e-4) and off == pytest.approx(0.01, abs=1e-3) and plain > 0.05


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "other"}, {"temperature": 0}, {"temperature": "1"}, {"temperature": float("nan")}, {"kind": BINS},
        {"kind": DIRICHLET, "bias": [0, 0], "weights": [[1, 0], [0]]}, {"kind": BINS, "edges": [2, 1], "shares": [1, 1, 1]},
        {"weights": 3}, {"more": 1},
    ],
)  # fmt: skip
def test_a_calibration_with_other_numbers_is_refused(wrong):
    with pytest.raises(TypeError):
        Calibration.read({**asdict(Calibration()), **wrong})
