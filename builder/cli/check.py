"""`hplm check`: what is wrong or doubtful about labelled data, before a training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from builder.cli.options import ColumnNames, open_store, wanted_start
from builder.tasks.columns import AS_TRAINED, Columns
from hplm.cli.options import TaskName, about, device_of, refuse_given
from hplm.errors import InvalidInput, some

if TYPE_CHECKING:
    from builder.store.store import Store, TenantVersion
    from builder.training.data import Data

TASK = "what is to be learned (default: that of --id, or what the first line has the form of)"


def check(
    *, train: Path, dev: Path | None = None, task: Annotated[TaskName, about(TASK)] = None, store: Path | None = None,
    domain: str | None = None, id: str | None = None, from_version: int | None = None, fresh: bool = False,
    new_labels: bool = False, columns: ColumnNames = AS_TRAINED,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Name what is wrong with labelled data, without a training.

    A fault is what `hplm build tenant` refuses; up to 20 are named, each with its line, and the exit status is 1. A warning is
    about what makes answers or scores worse; with warnings alone the exit status is 0.

    :param train: training data, JSONL, CSV or Parquet (docs/training.md)
    :param dev: dev data (default: a tenth of the training data)
    :param store: folder of a store: also look the texts up in its tables
    :param domain: domain of the tables (default: that of --id, or root)
    :param id: tenant of the store whose next version is to learn the data: they need its task and labels, and dev texts that
        its weights have learned are named, though their files may be gone
    :param from_version: the version of --id that will be trained on (default: as `hplm build tenant` chooses)
    :param fresh: none of its versions will be trained on
    :param new_labels: the data may have labels that --id lacks
    """
    from builder.store.store import check_name
    from builder.tasks.examples import MOST_FAULTS, Faults
    from builder.tasks.lookup import windows_found
    from builder.tasks.tasks import task_in
    from builder.training.quality import described, doubts
    from hplm.tasks.tasks import GENERATE

    if store is None:
        refuse_given("works only with --store", domain=domain, id=id)
    if id is None:
        refuse_given("works only with --id", from_version=from_version, fresh=fresh, new_labels=new_labels)
    wanted = wanted_start(from_version, fresh)
    opened, before = open_store(store) if store is not None else None, None
    if opened is not None and id is not None:
        check_name("tenant", id)
        if (before := opened.tenant(id)) is not None:
            task, domain, columns = task or before.task, domain or before.domain, columns.after(opened.report(before))
    if opened is not None:
        opened.latest(domain or "root")  # refuses an unknown one
    try:
        task = task or (GENERATE if opened is not None and opened.config.is_decoder else task_in(train, columns))
        data = _looked_up(opened, domain or "root", id, before, task, train, dev, wanted, new_labels, columns)
    except InvalidInput as error:
        faults = [*error.faults] if isinstance(error, Faults) else [str(error)]
        if isinstance(error, Faults) and task is not None and dev is not None:
            faults = [*dict.fromkeys([*faults, *_faults(task, dev, columns)])][:MOST_FAULTS]
        print(*faults, sep="\n")
        print(f"faults: {len(faults)}{' or more' * (len(faults) == MOST_FAULTS)}; `hplm build tenant` refuses these data")
        return {"task": task, "faults": faults, "warnings": []}, 1
    warnings, training, held = doubts(data), described(data.train), described(data.dev)
    for warning in warnings:
        print(f"warning: {warning}")
    new = data.labels[len(before.labels) :] if before is not None else []
    of_new = f", of which new: {some([*map(repr, new)])}" * bool(new)
    print(f"{task}: {training['texts']:,} texts to learn, {held['texts']:,} dev texts, {len(data.labels):,} labels{of_new}")
    if training["windows_found"]:
        print(windows_found(training["windows_found"]))
    return {"task": task, "faults": [], "warnings": warnings, "new_labels": new, "training": training, "dev": held}, 0


def _looked_up(
    store: Store | None, domain: str, id: str | None, before: TenantVersion | None, task: str, train: Path, dev: Path | None,
    wanted: int | None, new_labels: bool, columns: Columns,
) -> Data:  # fmt: skip
    """Returns the data as a training would have them. Without a store, nothing is looked up."""
    from builder.tables.text_files import digest_of_files
    from builder.tasks.labels import check_answers
    from builder.tasks.lookup import NoTables, Reader
    from builder.training.data import read_data
    from builder.training.generating import PromptReader
    from builder.training.start import chosen_embedding, chosen_start
    from hplm.tasks.tasks import check_backbone

    if store is None:
        return read_data(NoTables(), task, train, dev, device_of("cpu"), columns=columns)
    check_backbone(task, store.config)
    if before is not None:
        check_answers(before, task, before.labels)
    embedding, start = chosen_embedding(task, before, store.config, {}), None
    if id is not None:
        version = chosen_start(store, id, before, digest_of_files(train), wanted)
        start = store.tenant_version(id, version) if version else None
    reader = (PromptReader if store.config.is_decoder else Reader)(store, domain, store.latest(domain))
    return read_data(
        reader, task, train, dev, device_of("cpu"), before, start=start, columns=columns, embedding=embedding,
        new_labels=new_labels,
    )  # fmt: skip


def _faults(task: str, file: Path, columns: Columns) -> Sequence[str]:
    from builder.tasks.examples import Faults
    from builder.tasks.tasks import training_task

    try:
        training_task(task).read(file, columns)
    except InvalidInput as error:
        return error.faults if isinstance(error, Faults) else [str(error)]
    return []
