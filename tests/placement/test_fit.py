"""Terms are found again from times that they have made, and none is negative."""

from __future__ import annotations

import numpy as np
import pytest

from hplm.placement.fit import fit_error, fitted
from hplm.placement.profile import Shape, Terms

RNG = np.random.default_rng(3)
SHAPES = [Shape.of(RNG.integers(1, 200, RNG.integers(1, 30))) for _ in range(40)]


@pytest.mark.parametrize("terms", [Terms(1e6, 2e4, 3.0, 1e3), Terms(1e6), Terms(0.0, 2e4, 1.0, 0.0)])
def test_exact_times_give_their_terms(terms):
    ns = np.array([terms.ns(*shape) for shape in SHAPES])
    found = fitted(SHAPES, ns)
    error = fit_error(found, SHAPES, ns)
    assert error.max < 1e-6
    assert found.batch_ns == pytest.approx(terms.batch_ns, rel=1e-4, abs=1)
    assert found.token_ns == pytest.approx(terms.token_ns, rel=1e-4, abs=1e-3)


def test_no_term_is_negative_though_the_best_line_has_one():
    ns = np.array([max(1e3, 2e4 * shape.tokens - 1e5) for shape in SHAPES])
    found = fitted(SHAPES, ns)
    assert min(found.batch_ns, found.token_ns, found.score_ns, found.text_ns) >= 0
