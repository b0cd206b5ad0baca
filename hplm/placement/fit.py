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
    kept = np.arange(4)
    while True:
        found = np.linalg.lstsq(features[:, kept] / scale[kept], np.ones(len(ns)), rcond=None)[0]
        if len(kept) == 1 or found.min() >= 0:
            break
        kept = np.delete(kept, found.argmin())
    terms = np.zeros(4)
    terms[kept] = np.maximum(found, 0.0) / scale[kept]
    return Terms(*terms.tolist())


def fit_error(terms: Terms, shapes: Sequence[Shape], ns: Array) -> FitError:
    predicted = np.array([terms.ns(*shape) for shape in shapes])
    off = np.abs(predicted - ns) / ns
    return FitError(float(off.mean()), float(off.max()))


def _features(shapes: Sequence[Shape]) -> Array:
    return np.array([(1.0, *shape) for shape in shapes])
