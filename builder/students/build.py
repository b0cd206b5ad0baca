"""Makes the students of a tenant's newest version from the texts of its training, and stores a next version that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from builder.exits.answers import calibration_by
from builder.importing.texts import UnlabelledTexts
from builder.learning.bodies import PlotBody
from builder.learning.limits import check_rank
from builder.store.step import Step
from builder.store.store import Store, TenantVersion
from builder.students.boosting import boosted, learn_together, seen_by
from builder.students.options import StudentOptions
from builder.students.team import StudentTeam, served
from builder.tables.build_folder import locked_tenant
from builder.tasks.columns import AS_TRAINED
from builder.tasks.examples import Example, hash_of
from builder.tasks.lookup import Reader, Text
from builder.tasks.tasks import training_task
from builder.training.data import Data, file_of, read_data
from builder.training.finetuning import logits_of
from builder.training.model import TenantModel
from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.tasks.tasks import find_task
from hplm.tenants.knowledge import StudentKnowledge
from hplm.tenants.students import Students, Team


def build_students(
    store: Store, tenant_id: str, options: StudentOptions, device: torch.device, seen: Sequence[Path] = (),
    unlabelled: Path | None = None,
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """Stores a next version with students. Returns the report, and whether they are new: the same call changes nothing.

    Their teacher is the tenant's full stack. `seen`: files of its training that have moved. `unlabelled`: further texts, of
    which students learn only what the teacher says.
    """
    with locked_tenant(store, tenant_id):
        tenant = store.known_tenant(tenant_id)
        check(store, tenant_id, tenant.task, options)
        further = UnlabelledTexts([unlabelled]) if unlabelled is not None else None
        if further is not None and not training_task(tenant.task).one_label_a_row:
            raise InvalidInput(f"--unlabelled: tenant {tenant_id!r} has the task {tenant.task}; only classify and tag take it")
        before = store.knowledge(tenant)
        asked = {**asdict(options), **({"unlabelled": further.digest} if further is not None else {})}
        step = Step(store, tenant_id, "students", asked)
        if (known := step.done()) is not None:
            return known, False
        train_file, dev_file = _files(tenant, store.report(tenant), seen)
        reader, texts = Reader(store, tenant.domain, tenant.domain_version), further.examples if further else []
        labelled = store.seen(tenant).learned | store.seen(tenant).dev
        fresh = [example for example in texts if hash_of(example) not in labelled]
        if texts and not fresh:
            raise InvalidInput(f"--unlabelled {further}: the tenant's training or dev data have all of its texts")
        given = train_file, dev_file, device, tenant, tenant.dtype, tenant
        columns = AS_TRAINED.after(store.report(tenant))
        data = read_data(reader, tenant.task, *given, again=True, columns=columns)
        made, told = _made(tenant, data, fresh, options, step.folder(version=tenant.version))
        told = {"tenant": tenant.id, "version": tenant.version + 1, **told, "left_out": len(texts) - len(fresh)}
        found, hashes = replace(before, exits=None, students=made), frozenset(map(hash_of, fresh))
        step.finish(told, lambda report: store.save_next(tenant, found, report, hashes), without="exits")
        return told, True


def _files(tenant: TenantVersion, report: Mapping[str, Any], moved: Sequence[Path]) -> tuple[Path, Path | None]:
    """Returns the training file of a version, and its dev file if it had one."""
    if "training" not in report:
        raise InvalidInput(
            f"tenant {tenant.id!r} was imported and has learned from no file: train it with `hplm build tenant` first"
        )
    files = []
    for part in ("training", "dev") if report["asked"]["dev"] is not None else ("training",):
        if (file := file_of(report[part], moved)) is None:
            raise InvalidInput(
                f"version {tenant.version} of tenant {tenant.id!r} was trained on {report[part]['file']}, which was moved or "
                "changed since: name the file as it was with --seen"
            )
        files.append(file)
    return files[0], files[1] if len(files) > 1 else None


def extended(data: Data, *further: Sequence[Text]) -> Data:
    """Returns data that have further texts in their training, of which nothing is learned but what a teacher says."""
    return replace(data, train=replace(data.train, texts=list(chain(data.train.texts, *further))))


def check(store: Store, tenant_id: str, task: str, options: StudentOptions) -> None:
    """Refuses tasks without students, and members without layers, or deeper or wider than the backbone."""
    if not find_task(task).takes_students:
        raise InvalidInput(f"tenant {tenant_id!r} has the task {task}, which students cannot answer")
    layers = store.config.upper_layers
    if not 1 <= options.depth <= layers:
        raise InvalidInput(f"--layers {options.depth}: give 1 to {layers}, as many upper layers as the backbone has")
    check_rank(options.rank, store.config.hidden)


def _made(
    tenant: TenantVersion, data: Data, further: Sequence[Example], options: StudentOptions, folder: Path
) -> tuple[StudentKnowledge, dict[str, Any]]:
    body = PlotBody.of(data.reader.store).to(data.device).eval().requires_grad_(False)
    own = data.reader.store.knowledge(tenant)
    teacher, labelled = TenantModel.of(own.adapter, own.head).to(data.device), len(data.train.texts)
    unlabelled = data.reader.read(further, data.task.unlabelled(), data.labels).texts if further else []
    data = extended(data, unlabelled)
    seen = seen_by(body, teacher, data, data.train), seen_by(body, teacher, data, data.dev)
    taught = data.scored(data.dev, [rows.numpy() for rows in seen[1].logits])
    team = team_of(data, teacher, options, tenant.dtype)
    boosting = boosted(body, team, data, seen, options, folder)
    learn_together(body, team, data, seen[0], options, folder)
    learned = team.knowledge()
    each = [logits_of(body, served([own], options.depth, data.device), data, data.dev) for own in learned]
    sums = list(accumulate(each, lambda before, own: [*map(np.add, before, own)]))  # what one says, two together, and so on
    scores = [data.scored(data.dev, logits).main for logits in sums]
    best = 1 + int(np.argmax(scores))
    learned = learned[:best]
    found = StudentKnowledge(Students(options.depth, _teams(data, sums[:best], options.depth)), learned)
    return found, {
        "task": tenant.task, "metric": taught.metric, "of_layers": data.config.upper_layers, "teacher_score": taught.main,
        "learned_texts": labelled, "unlabelled_texts": len(unlabelled), "dev_texts": len(data.dev.texts),
        "depth": options.depth, "boosting": boosting, "scores": [round(score, 5) for score in scores], "kept": best,
        "bytes": sum(layout.weight_bytes for member in learned for layout, _ in member),
    }  # fmt: skip


def _teams(data: Data, logits: Sequence[Sequence[Array]], depth: int) -> tuple[Team, ...]:
    """Returns a team of each size, the largest first. `logits`: what one says of dev, two together, and so on."""
    share, is_calibrated = depth / data.config.upper_layers, data.task.served.read_each is not None
    found = list[Team]()
    for size, own in enumerate(logits, start=1):
        joined = torch.from_numpy(np.concatenate(own))
        sure = calibration_by(data.dev.examples, data.labels, joined) if is_calibrated else None
        found.insert(0, Team(size, size * share, sure))
    return tuple(found)


def team_of(
    data: Data, teacher: TenantModel, options: StudentOptions, dtype: str, kind: type[StudentTeam] = StudentTeam
) -> StudentTeam:
    """Returns a team without members. Its classifier starts as the teacher's head, if that has one layer."""
    torch.manual_seed(options.seed)
    team = kind(data.config, options.depth, options.rank, len(data.labels), dtype, options.seed, data.device)
    team.mean, team.spread = data.task.scale(data.train.examples)
    if "dense" not in teacher.head:
        team.start_at(teacher.head["weight"][0], teacher.head["bias"][0])
    return team
