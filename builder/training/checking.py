"""Checks labelled data as a training reads them, and keeps their faults instead of ending at the first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder.store.store import Store, check_name
from builder.tasks.columns import Columns
from builder.tasks.labels import check_answers
from builder.tasks.lookup import Reader
from builder.tasks.tasks import task_in, training_task
from builder.training.build import chosen_task
from builder.training.data import parts_of
from builder.training.generating import PromptReader
from builder.training.quality import cut, described, looked_up
from builder.training.start import chosen_embedding
from hplm.errors import InvalidInput
from hplm.tasks.tasks import check_backbone

MOST_FAULTS = 20


def check_data(
    train: Path, dev: Path | None, task: str | None, columns: Columns, store: Store | None, tenant_id: str | None,
    domain: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Returns the faults, for which a training refuses the data, the warnings, and what its report says about the data.

    Without a store nothing is looked up. `tenant_id`: the tenant that is to learn the data. Others: as of `build_tenant`.
    """
    before = seen = stands_on = None
    if store is not None:
        before = store.tenant(check_name("tenant", tenant_id)) if tenant_id is not None else None
        domain = domain or (before.domain if before is not None else "root")
        stands_on = store, domain, store.latest(domain)
        if before is not None:
            columns, seen = columns.after(store.report(before)), store.seen(before)
        if before is not None or store.config.is_decoder:
            task = chosen_task(store.config, tenant_id or "", before, task)
    faults, warnings = list[str](), list[str]()
    found: dict[str, Any] = {"task": task, "faults": faults, "warnings": warnings}

    def keep(fault: InvalidInput) -> None:
        if len(faults) == MOST_FAULTS - 1:
            raise fault
        faults.append(str(fault))

    try:
        found["task"] = task = task or task_in(train, columns)
        own = training_task(task)
        if stands_on is not None:
            check_backbone(task, stands_on[0].config)
            own = own.of(chosen_embedding(task, before, stands_on[0].config, {}))
        if before is not None:
            check_answers(before, task, before.labels)
        training, held = own.read(train, columns, keep), own.read(dev, columns, keep) if dev is not None else None
        if faults:  # what is missing in them would be told again
            return found
        form = {"known": before, "dtype": before.dtype} if before is not None else {}
        parts = parts_of(own, training, held, **form, before=seen, faulty=keep)
        warnings += parts.warnings
        found |= {"training": described(parts.train), "dev": described(parts.dev)}
        if stands_on is not None and not faults:
            reader = (PromptReader if own.served.generates else Reader)(*stands_on)
            learned, judged = (reader.read(part, own, parts.labels) for part in (parts.train, parts.dev))
            warnings += cut(learned)
            found["training"] |= looked_up(learned)
            found["dev"] |= looked_up(judged)
    except InvalidInput as fault:
        faults.append(str(fault))
    return found
