"""Checks of a tenant's labels and values: a head must be able to learn and to store them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from builder.store.store import TenantVersion
from builder.tasks.examples import MOST_FAULTS, Example, Faults
from hplm.adapters.heads import SIZES
from hplm.errors import InvalidInput, some
from hplm.tasks.tasks import TASKS

NEW_LABELS = "--new-labels"

# Limits of the values of a regression, because its head is stored in 16 bits.
FARTHEST_MEAN = {"fp16": 100.0, "bf16": 12.0}  # standard deviations from 0
LEAST_SPREAD = {"fp16": 1e-3, "bf16": 1e-30}  # of the standard deviation: below it the head's weights vanish
LARGEST_VALUE = 10_000.0


def labels_in(examples: Sequence[Example], fewest: int) -> list[str]:
    """Returns all labels that occur, by name."""
    labels = sorted({label for example in examples for label in example.labels})
    check_count(labels, examples)
    if not labels:
        raise InvalidInput(f"{examples[0].file}: no text has a label: nothing can be learned")
    if len(labels) < fewest:
        raise InvalidInput(f"{examples[0].file}: every label is {labels[0]!r}: give at least two different ones")
    return labels


def check_count(labels: Sequence[str], examples: Sequence[Example]) -> None:
    if len(labels) > SIZES[-1]:
        raise InvalidInput(f"{examples[0].file}: {len(labels):,} labels, and heads go up to {SIZES[-1]:,}: leave out rare ones")


def head_labels(
    before: TenantVersion | None, task: str, examples: Sequence[Example], found: list[str], goes_on: bool, new_labels: bool
) -> list[str]:
    """Returns the labels of a head's rows: those of the version before, and behind them new ones.

    `found`: those of the data. `goes_on`: its start knows labels that the data lack. `new_labels`: whether there may be any.
    """
    if before is None:
        return found
    known, given = set(before.labels), set(found)
    kept = [label for label in before.labels if goes_on or label in given]
    new = [label for label in found if label not in known]
    if not new_labels:
        way_out = f"correct it, give {NEW_LABELS} to add it, or choose another --id"
        check_labels(examples, before.labels, f"version {before.version} of tenant {before.id!r}", way_out)
    check_answers(before, task, kept if new_labels else [*kept, *new])
    labels = [*before.labels, *new]
    check_count(labels, examples)
    return labels


def check_new_labels(task: str) -> None:
    """Refuses tasks whose labels are always the same, or that have none."""
    able = [name for name, own in TASKS.items() if own.has_head and not own.fixed_labels]
    if task not in able:
        raise InvalidInput(f"{NEW_LABELS} is for tenants of {', '.join(able)}, and this one is to {task}: leave it out")


def mean_and_spread(examples: Sequence[Example]) -> tuple[float, float]:
    values = np.array([example.value for example in examples])
    return float(values.mean()), float(values.std())


def check_values(examples: Sequence[Example], dtype: str) -> None:
    """Checks the values of the training part."""
    values = np.array([example.value for example in examples])
    mean, spread = mean_and_spread(examples)
    if not spread:
        raise InvalidInput(f"{examples[0].file}: every value is {mean:g}: give different values")
    if abs(mean) > FARTHEST_MEAN[dtype] * spread or float(np.abs(values).max()) > LARGEST_VALUE:
        raise InvalidInput(
            f"{examples[0].file}: values around {mean:g} that differ by {spread:g} cannot be told apart in the 16 bits "
            f"({dtype}) in which heads are stored: subtract their mean, or scale them below {LARGEST_VALUE:,.0f}"
        )
    if spread < LEAST_SPREAD[dtype]:
        raise InvalidInput(
            f"{examples[0].file}: values that differ by {spread:g} are too small for the 16 bits ({dtype}) in which heads are "
            "stored: scale them up"
        )


def check_answerable(examples: Sequence[Example], dtype: str) -> None:
    """Refuses questions that are all without an answer."""
    if not any(example.answers for example in examples):
        raise InvalidInput(f"{examples[0].file}: no question has an answer: add some that have one")


def check_near(examples: Sequence[Example], dtype: str) -> None:
    """Refuses rated pairs, which only judge."""
    if (rated := next((example for example in examples if example.is_rated), None)) is not None:
        raise InvalidInput(f"{rated.where}: a rated pair only judges (--dev, --test): give lines with 'positive' to learn from")


def check_labels(
    examples: Sequence[Example], labels: Sequence[str], source: str, way_out: str = "correct it, or train with examples of it"
) -> None:
    """Refuses labels that are not among these, which `source` has."""
    known, listed = set(labels), some(labels, most=10)
    unknown = [(example.where, label) for example in examples for label in example.labels if label not in known]
    if unknown:
        reason = f"does not occur in {source}: {way_out} (known: {listed})"
        raise Faults([f"{where}: label {label!r} {reason}" for where, label in unknown[:MOST_FAULTS]])


def check_answers(before: TenantVersion, task: str, labels: list[str]) -> None:
    """Refuses an update that changes the tenant's task or labels: clients rely on them."""
    changed = []
    if task != before.task:
        changed.append(f"its task is {before.task}, not {task}")
    if added := sorted(map(repr, set(labels) - set(before.labels))):
        changed.append(f"it does not have the labels {some(added)}")
    if missing := sorted(map(repr, set(before.labels) - set(labels))):
        changed.append(f"its labels {some(missing)} are missing")
    if changed:
        raise InvalidInput(
            f"tenant {before.id!r} has a version {before.version} and an update keeps task and labels, but "
            f"{'; '.join(changed)}: choose another --id"
        )
