"""Texts that go on: Eq. 4 against values computed by hand."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.levels.calibration import UNKNOWN
from hplm.levels.dispatch import draw, probabilities, reroutes

SHARES = st.floats(0, 1, allow_subnormal=False)


def test_the_probability_is_that_of_the_paper():
    # c = 0.9, k = 4: 0.95 is halfway between c and 1, so its norm is 0; 0.975 and 1 have the norms 1/4 and 1/2.
    found = probabilities(np.array([0.95, 0.975, 1.0]), 0.9, 4.0)
    assert found == pytest.approx([0.5, 1 / (1 + np.e), 1 / (1 + np.e**2)])
    assert probabilities(np.array([0.2, 0.9]), 0.9, 4.0).tolist() == [1, 1]
    assert probabilities(np.array([0.91, 0.99]), 0.9, 0.0).tolist() == [0.5, 0.5]  # a flat slope is a coin


def test_a_text_goes_on_if_its_draw_is_below_the_probability():
    confidences = np.array([0.9, 0.95, 0.95, 0.975, 0.975])
    draws = np.array([0.999, 0.49, 0.51, 0.26, 0.27])
    assert reroutes(confidences, 0.9, 4.0, draws).tolist() == [True, True, False, True, False]


def test_every_text_may_have_a_plan_of_its_own():
    found = reroutes(
        np.array([0.8, 0.8, 0.8]), np.array([0.9, 0.7, 1.0]), np.array([4.0, 1e9, 4.0]), np.array([0.9, 0.6, 0.99])
    )
    assert found.tolist() == [True, True, True]
    # A slope without end is a hard cut halfway between c and 1.
    assert reroutes(np.array([0.86, 0.84]), 0.7, np.array([1e9, 1e9]), 0.5).tolist() == [False, True]


def test_a_cutoff_below_zero_cuts_low_confidences():
    confidences = np.array([UNKNOWN, 0.0, 0.24, 0.26, 0.5])
    assert reroutes(confidences, -0.5, 1e9, 0.5).tolist() == [True, True, True, False, False]


@settings(max_examples=60)
@given(SHARES, st.floats(-1, 1, allow_subnormal=False), st.floats(0, 1e12), st.floats(0, 1, exclude_max=True))
def test_with_a_cutoff_of_one_or_without_a_confidence_all_go_on(confidence, cutoff, slope, drawn):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reroutes(np.array([confidence]), 1.0, slope, drawn).all()
        assert reroutes(np.array([UNKNOWN]), cutoff, slope, drawn).all()
        found = probabilities(np.array([confidence]), cutoff, slope)
    assert 0 < found <= 1 and (confidence > cutoff or found == 1)


def test_the_share_that_goes_on_is_the_probability():
    draws = np.array([draw(np.array([text, 7 * text]), 3) for text in range(20_000)])
    going = reroutes(np.full(len(draws), 0.975), 0.9, 4.0, draws)
    assert going.mean() == pytest.approx(1 / (1 + np.e), abs=0.01)


def test_a_draw_depends_on_text_version_and_step_alone():
    rows = np.arange(12) * 1000
    assert draw(rows, 3) == draw(rows.copy(), 3)
    assert len({draw(rows, 3), draw(rows, 4), draw(rows, 3, 1), draw(rows[::-1].copy(), 3), draw(rows[:-1], 3)}) == 5


def test_draws_are_uniform_and_those_of_other_versions_and_steps_tell_nothing_about_them():
    texts = [np.array([4, text, 9]) for text in range(20_000)]
    drawn = np.array([[draw(rows, *version) for rows in texts] for version in ((1, 0), (2, 0), (1, 1))])
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = np.array([np.histogram(own, 20, (0, 1))[0] for own in drawn])
    assert np.abs(counts - 1000).max() < 150  # five standard deviations
    assert np.abs(np.corrcoef(drawn) - np.eye(3)).max() < 0.04
