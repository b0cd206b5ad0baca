"""The labelled data of a tenant's training, and what it starts from. It can be opened again in another process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from builder.store.resumable import digest_of
from builder.store.store import Store, TenantFile
from builder.tables.text_files import check_file
from builder.training.bodies import PlotBody
from builder.training.examples import Divided, Reader, split_off
from builder.training.finetuning import Ground, TrainingOptions
from builder.training.labelled import Labelled
from builder.training.labels import check_labels
from builder.training.tasks import training_task
from hplm.errors import InvalidInput

DEV_SHARE = 0.1


class Parts(NamedTuple):
    training: Labelled
    dev: Labelled
    labels: list[str]  # of the head's rows
    divided: Divided | None = None  # how the training file was divided, if there is no dev file


@dataclass(frozen=True)
class Material:
    store: Path
    domain: str
    domain_version: int
    task: str
    train: Path
    dev: Path | None
    labels: tuple[str, ...] = ()  # of the version before, whose order the head keeps
    dtype: str = TrainingOptions.dtype  # of the stored head
    start: TenantFile | None = None  # the version that is trained on; None: random weights

    def read(self) -> Parts:
        task, known = training_task(self.task), set(self.labels)
        training = task.read(self.train)
        labels = task.labels(training)
        if set(labels) == known or (self.start is not None and set(labels) < known):
            labels = list(self.labels)  # the start knows labels that the new data lack
        if self.dev is not None:
            dev, divided = task.read(self.dev), None
            check_labels(dev, labels, str(self.train))
        else:
            training, dev, divided = split_off(training, DEV_SHARE, self._divided_before())
        task.check(training, self.dtype)
        return Parts(training, dev, labels, divided)

    def open(self, device: torch.device, show_progress: bool = False) -> tuple[Ground, PlotBody]:
        store, task, parts = Store(self.store), training_task(self.task), self.read()
        reader = Reader(store, self.domain, self.domain_version)
        texts, dev = (reader.read(part, task, parts.labels, show_progress) for part in (parts.training, parts.dev))
        start = store.tenant_weights(self.start) if self.start is not None else None
        ground = Ground(store.config, reader, texts, dev, task, parts.labels, device, start)
        return ground, PlotBody(store.upper(), store.config.heads)

    def plan(self) -> dict[str, Any]:
        """Returns the digests of the data: an interrupted training continues only with the same data."""
        return {
            "domain": self.domain,
            "domain_version": self.domain_version,
            "tables": Store(self.store).chain_digest(self.domain, self.domain_version),
            "task": self.task,
            "training": _digest(self.train),
            "dev": _digest(self.dev) if self.dev is not None else None,
        }

    def _divided_before(self) -> Divided | None:
        """Returns how the start's data were divided: a text that it has learned must not come to dev."""
        if self.start is None:
            return None
        report = Store(self.store).report(self.start)
        if (divided := Divided.of(report)) is None and "training" in report:  # an import has learned from no file
            raise InvalidInput(
                f"version {self.start.version} of tenant {self.start.id!r} was trained with a dev file, so any text of "
                f"{self.train} may be one that it has learned: give --dev FILE, or --fresh to train anew"
            )
        return divided


def _digest(path: Path) -> str:
    check_file(path)
    return digest_of(path)
