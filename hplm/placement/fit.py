"""Fits the terms of a step to measured times, and says how far other measurements lie from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hplm.arrays import Array
from hplm.placement.profile import FitError, Shape, Terms


def fitted(shapes: Sequence[Shape], ns: Array) -> Terms:
    """Returns terms by least squares, none of them negative. Errors count relative to the measured times."""
    features = _features(shapes) / ns[:, None]
    scale = np.maximum(np.linalg.norm(features, axis=0), 1e-300)
    features /= scale
    kept = [0, 1, 2, 3]
    found = _solved(features)
    while len(kept) > 1 and min(found) < 0:
        del kept[found.index(min(found))]
        found = _solved(features[:, kept])
    terms = np.zeros(4)
    terms[kept] = np.maximum(found, 0.0) / scale[kept]
    return Terms(*terms.tolist())


def fit_error(terms: Terms, shapes: Sequence[Shape], ns: Array) -> FitError:
    predicted = np.array([terms.ns(*shape) for shape in shapes])
    off = np.abs(predicted - ns) / ns
    return FitError(float(off.mean()), float(off.max()))


def _solved(features: Array) -> list[float]:
    """Returns what comes nearest to 1 in all rows."""
    inverse: Array = np.linalg.pinv(features)
    return inverse.sum(axis=1).tolist()


def _features(shapes: Sequence[Shape]) -> Array:
    return np.array([(1.0, *shape) for shape in shapes])
