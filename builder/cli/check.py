"""`hplm check`: what is wrong or doubtful about labelled data, before a training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from builder.cli.options import ColumnNames, open_store
from builder.tasks.columns import AS_TRAINED
from hplm.cli.options import TaskName, about, device_of, refuse_given
from hplm.errors import InvalidInput

TASK = "what is to be learned (default: what the first line has the form of)"


def check(
    *, train: Path, dev: Path | None = None, task: Annotated[TaskName, about(TASK)] = None, store: Path | None = None,
    domain: str | None = None, columns: ColumnNames = AS_TRAINED,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Name what is wrong with labelled data, without a training.

    A fault is what `hplm build tenant` refuses; up to 20 are named, each with its line, and the exit status is 1. A warning is
    about what makes answers or scores worse; with warnings alone the exit status is 0.

    :param train: training data, JSONL, CSV or Parquet (docs/training.md)
    :param dev: dev data (default: a tenth of the training data)
    :param store: folder of a store: also look the texts up in its tables
    :param domain: domain of the tables (default: root)
    """
    from builder.tasks.examples import MOST_FAULTS, Faults
    from builder.tasks.lookup import NoTables, Reader, windows_found
    from builder.tasks.tasks import task_in
    from builder.training.data import read_data
    from builder.training.generating import PromptReader
    from builder.training.quality import described, doubts
    from builder.training.start import chosen_embedding
    from hplm.tasks.tasks import GENERATE, check_backbone

    if store is None:
        refuse_given("works only with --store", domain=domain)
    reader, config, embedding = NoTables(), None, None
    if store is not None:
        opened, name = open_store(store), domain or "root"
        config = opened.config
        reader = (PromptReader if config.is_decoder else Reader)(opened, name, opened.latest(name))
    try:
        task = task or (GENERATE if config is not None and config.is_decoder else task_in(train, columns))
        if config is not None:
            check_backbone(task, config)
            embedding = chosen_embedding(task, None, config, {})
        data = read_data(reader, task, train, dev, device_of("cpu"), columns=columns, embedding=embedding)
    except InvalidInput as error:
        faults = error.faults if isinstance(error, Faults) else [str(error)]
        print(*faults, sep="\n")
        print(f"faults: {len(faults)}{' or more' * (len(faults) == MOST_FAULTS)}; `hplm build tenant` refuses these data")
        return {"task": task, "faults": faults, "warnings": []}, 1
    warnings, training, held = doubts(data), described(data.train), described(data.dev)
    for warning in warnings:
        print(f"warning: {warning}")
    print(f"{task}: {training['texts']:,} texts to learn, {held['texts']:,} dev texts, {len(data.labels):,} labels")
    if training["windows_found"]:
        print(windows_found(training["windows_found"]))
    return {"task": task, "faults": [], "warnings": warnings, "training": training, "dev": held}, 0
