"""A tenant: labelled data become an adapter and a head on top of a domain's tables."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from builder.store.resumable import digest_of, write_json
from builder.store.store import Store, TenantFile, check_name
from builder.tables.build_folder import PLAN, held, put_away
from builder.tables.text_files import check_file
from builder.training.bodies import PlotBody
from builder.training.examples import Reader, Texts, split_off
from builder.training.finetuning import Ground, Trained, TrainingOptions, adapter_of, train
from builder.training.grid import points, train_grid
from builder.training.labelled import Labelled
from builder.training.labels import check_labels
from builder.training.learning_curve import draw_training
from builder.training.tasks import training_task
from hplm.engine.engine import resolve_device
from hplm.errors import InvalidInput

DEV_SHARE = 0.1
UNEVEN = 20  # times as many texts of one label as of another are worth a word


@dataclass(frozen=True)
class Material:
    """What a tenant learns from: enough to open it again, in this process or in another."""

    store: Path
    domain: str
    domain_version: int
    task: str
    train: Path
    dev: Path | None
    seed: int
    labels: tuple[str, ...] = ()  # of the version before: the rows of its head keep their order
    dtype: str = TrainingOptions.dtype  # in which the head will be stored

    def read(self) -> tuple[Labelled, Labelled, list[str]]:
        """Training part, dev part, and what the head's rows stand for."""
        task = training_task(self.task)
        training = task.read(self.train)
        labels = task.labels(training)
        if set(labels) == set(self.labels):
            labels = list(self.labels)
        if self.dev is None:
            training, dev = split_off(training, DEV_SHARE, self.seed)
        else:
            dev = task.read(self.dev)
            check_labels(dev, labels, str(self.train))
        task.check(training, self.dtype)
        return training, dev, labels

    def open(self, device: torch.device, show_progress: bool = False) -> tuple[Ground, PlotBody]:
        store, task = Store(self.store), training_task(self.task)
        training, dev, labels = self.read()
        reader = Reader(store, self.domain, self.domain_version)
        texts, dev_texts = (reader.read(part, task, labels, show_progress) for part in (training, dev))
        ground = Ground(store.config, reader, texts, dev_texts, task, labels, device)
        return ground, PlotBody(store.upper(), store.config.heads)

    def plan(self) -> dict[str, Any]:
        """What it is, by content: a training that was cut goes on with nothing else."""
        return {
            "domain": self.domain,
            "domain_version": self.domain_version,
            "tables": Store(self.store).chain_digest(self.domain, self.domain_version),
            "task": self.task,
            "training": _file(self.train),
            "dev": _file(self.dev) if self.dev is not None else None,
        }


def build_tenant(
    store: Store,
    tenant_id: str,
    domain: str,
    task: str,
    train_file: Path,
    dev_file: Path | None = None,
    grid: bool = False,
    device: torch.device | None = None,
    show_progress: bool = True,
    **training: Any,
) -> TenantFile:
    """Trains the tenant, or its next version if it exists, and stores it with its report; `training`: `TrainingOptions`.

    Cut anywhere, the same call goes on where it was, to the same bytes.
    """
    check_name("tenant", tenant_id)
    training_task(task)  # refuses one that there is not
    options = TrainingOptions(**training)
    if options.body_rate and not options.cut:
        raise InvalidInput("upper layers that learn need an adapter to hold what they learned: give --rank above 0")
    adapter_of(store.config, options)  # refuses projections and kinds that there are not, before anything is put away
    device = device or resolve_device("auto")
    working = store.tenant_work_folder(tenant_id)
    with held(working, f"tenant {tenant_id!r}"):
        before = store.tenant(tenant_id)
        known = tuple(before.labels) if before is not None else ()
        stands_on = (domain, store.latest(domain))
        material = Material(store.folder, *stands_on, task, train_file, dev_file, options.seed, known, options.dtype)
        given, dev, labels = material.read()
        plan = {**material.plan(), "labels": labels, **asdict(options), "grid": grid}
        plan = json.loads(json.dumps(plan))  # as it is read again
        if before is not None:
            _check_same_answers(before, task, labels)
        version = before.version + 1 if before else 1

        if before is not None and _begun(working) == {"version": before.version, **plan} and _learned_from(plan, store, before):
            put_away(working)  # the same command was cut after its tenant was stored
            return before
        _begin(working, tenant_id, {"version": version, **plan})
        tried = []
        if grid:
            opened = partial(material.open, device)
            trained, tried = train_grid(opened, points(options), working, device, show_progress)
            ground = opened()[0]
        else:
            ground, body = material.open(device, show_progress)
            trained = train(body, ground, options, working / "training.pt", show_progress)
        tenant = TenantFile(
            tenant_id, version, domain, material.domain_version, task, labels, options.rank, options.adapter,
            options.worked_on, dtype=options.dtype,
        )  # fmt: skip
        report = _report(plan, (given, ground.texts), (dev, ground.dev), trained)
        if tried:
            report["grid"] = [point.described() for point in tried]
        title = f"{tenant_id} version {version}: {task} on {domain}"
        store.save_tenant(tenant, *trained.model.stored(), report, partial(draw_training, report, title))
        put_away(working)
        return tenant


def _report(
    plan: dict[str, Any], training: tuple[Labelled, Texts], dev: tuple[Labelled, Texts], trained: Trained
) -> dict[str, Any]:
    counts = Counter(label for example in training[0].examples for label in example.labels)
    uneven = max(counts.values()) / min(counts.values()) if counts else 1.0
    return {
        "task": plan["task"],
        "training": {**plan["training"], **_described(*training)},
        "dev": {**(plan["dev"] or plan["training"]), **_described(*dev), **trained.scores.described()},
        "imbalance": round(uneven, 1),
        **trained.report,
    }


def warnings_of(report: dict[str, Any]) -> list[str]:
    """What in a tenant's report its owner should know before its scores are trusted."""
    said, counts = [], report["training"]["label_counts"]
    if report["imbalance"] >= UNEVEN:
        most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        said.append(f"labels are uneven: {most!r} {counts[most]:,} times, {least!r} {counts[least]:,}; look at macro_f1 too")
    if cut := report["training"]["texts_cut"]:
        said.append(f"{cut:,} of {report['training']['texts']:,} texts are longer than the model takes and were cut")
    return said


def _file(path: Path) -> dict[str, str]:
    check_file(path)
    return {"file": str(path.resolve()), "digest": digest_of(path)}


def _begun(folder: Path) -> dict[str, Any] | None:
    """The plan of a training that was cut."""
    return json.loads((folder / PLAN).read_text("utf-8")) if (folder / PLAN).exists() else None


def _learned_from(plan: dict[str, Any], store: Store, tenant: TenantFile) -> bool:
    """Not if it was imported meanwhile."""
    return store.report(tenant).get("training", {}).get("digest") == plan["training"]["digest"]


def _begin(folder: Path, tenant_id: str, plan: dict[str, Any]) -> None:
    """What another training left behind is of no use to this one."""
    begun = _begun(folder)
    if begun == plan:
        return
    if begun is not None and {**begun, "version": plan["version"]} == plan:  # an import has taken the number meanwhile
        write_json(folder / PLAN, plan)
        return
    if begun is not None:
        print(f"tenant {tenant_id}: a training that was cut had other data or options; this one begins anew", file=sys.stderr)
    put_away(folder)
    write_json(folder / PLAN, plan)


def _check_same_answers(before: TenantFile, task: str, labels: list[str]) -> None:
    """An update must not change what clients of the tenant know of it."""
    changed = []
    if task != before.task:
        changed.append(f"its task is {before.task}, not {task}")
    if added := sorted(set(labels) - set(before.labels)):
        changed.append(f"it does not have the labels {added}")
    if missing := sorted(set(before.labels) - set(labels)):
        changed.append(f"the data have no examples of its labels {missing}")
    if changed:
        raise InvalidInput(
            f"tenant {before.id!r} has a version {before.version} and an update keeps task and labels, but "
            f"{'; '.join(changed)}: build a tenant of another --id"
        )


def _described(labelled: Labelled, texts: Texts) -> dict[str, Any]:
    counts = Counter(label for example in labelled.examples for label in example.labels)
    return {
        "texts": len(texts.texts),
        "texts_cut": texts.cut,
        "label_counts": dict(sorted(counts.items())),
        "windows_found": texts.found,
    }
