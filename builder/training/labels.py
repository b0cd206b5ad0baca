"""What the labels and values of a tenant's data must be, so that a head can learn them and hold them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from builder.training.labelled import Example, Labelled
from hplm.adapters.heads import SIZES
from hplm.errors import InvalidInput

# Of values that a head is to say, which is stored in 16 bits.
FARTHEST_MEAN = {"fp16": 100.0, "bf16": 12.0}  # standard deviations from 0
LEAST_SPREAD = {"fp16": 1e-3, "bf16": 1e-30}  # below it a head's weights are next to nothing
LARGEST_VALUE = 10_000.0


def labels_in(labelled: Labelled, fewest: int) -> list[str]:
    """All that occur, in order of their names."""
    labels = sorted({label for example in labelled.examples for label in example.labels})
    if len(labels) > SIZES[-1]:
        raise InvalidInput(f"{labelled.path}: {len(labels):,} labels, and heads go up to {SIZES[-1]:,}: leave out rare ones")
    if not labels:
        raise InvalidInput(f"{labelled.path}: no text has a label: there is nothing to learn")
    if len(labels) < fewest:
        raise InvalidInput(f"{labelled.path}: every label is {labels[0]!r}: there is nothing to tell apart")
    return labels


def mean_and_spread(examples: Sequence[Example]) -> tuple[float, float]:
    values = np.array([example.value for example in examples])
    return float(values.mean()), float(values.std())


def check_values(labelled: Labelled, dtype: str) -> None:
    """Of the part that is learned from."""
    values = np.array([example.value for example in labelled.examples])
    mean, spread = mean_and_spread(labelled.examples)
    if not spread:
        raise InvalidInput(f"{labelled.path}: every value to learn from is {mean:g}: there is nothing to tell apart")
    if abs(mean) > FARTHEST_MEAN[dtype] * spread or float(np.abs(values).max()) > LARGEST_VALUE:
        raise InvalidInput(
            f"{labelled.path}: values around {mean:g} that differ by {spread:g} cannot be told apart in the 16 bits ({dtype}) "
            f"in which heads are stored: subtract their mean, or scale them below {LARGEST_VALUE:,.0f}"
        )
    if spread < LEAST_SPREAD[dtype]:
        raise InvalidInput(
            f"{labelled.path}: values that differ by {spread:g} are too small for the 16 bits ({dtype}) in which heads are "
            "stored: scale them up"
        )


def check_labels(labelled: Labelled, labels: Sequence[str], source: str) -> None:
    """Every label must be one that training has seen."""
    known = set(labels)
    for example in labelled.examples:
        for label in example.labels:
            if label not in known:
                raise InvalidInput(
                    f"{labelled.path}:{example.line}: label {label!r} does not occur in {source}: "
                    f"correct it, or train with examples of it (known: {_listed(labels)})"
                )


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels[:10]) + (f", ... {len(labels)} in all" if len(labels) > 10 else "")
