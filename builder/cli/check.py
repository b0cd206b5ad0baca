"""`hplm check`: what is wrong or doubtful about labelled data, before a training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from builder.cli.options import ColumnNames, open_store
from builder.tasks.columns import AS_TRAINED
from hplm.cli.options import TaskName, about, refuse_given

TASK = "what is to be learned (default: that of the tenant, or of the first line's form)"


def check(
    *, train: Path, dev: Path | None = None, task: Annotated[TaskName, about(TASK)] = None, store: Path | None = None,
    domain: str | None = None, id: str | None = None, columns: ColumnNames = AS_TRAINED,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Name what is wrong with labelled data, without a training.

    A fault is what `hplm build tenant` refuses; up to 20 are named, each with its line, and the exit status is 1. A warning is
    about what makes answers or scores worse; with warnings alone the exit status is 0.

    :param train: training data, JSONL, CSV or Parquet (docs/training.md)
    :param dev: dev data (default: a tenth of the training data)
    :param store: folder of a store: also look the texts up in its tables
    :param domain: domain of the tables (default: that of the tenant, or root)
    :param id: name of the tenant that is to learn the data, also as its next version
    """
    from builder.tasks.lookup import windows_found
    from builder.training.checking import MOST_FAULTS, check_data

    if store is None:
        refuse_given("works only with --store", domain=domain, id=id)
    found = check_data(train, dev, task, columns, open_store(store) if store is not None else None, id, domain)
    for said in (*found["faults"], *(f"warning: {warning}" for warning in found["warnings"])):
        print(said)
    if faults := len(found["faults"]):
        print(f"faults: {faults}{' or more' * (faults == MOST_FAULTS)}; `hplm build tenant` refuses these data")
        return found, 1
    training, labels = found["training"], len(found["training"]["label_counts"])
    print(f"{found['task']}: {training['texts']:,} texts to learn, {found['dev']['texts']:,} dev texts, {labels:,} labels")
    if "windows_found" in training:
        print(windows_found(training["windows_found"]))
    return found, 0
