"""The data that the levels of a tenant's version learn from: those that the version itself has learned from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from builder.store.resumable import digest_of
from builder.store.store import Store, TenantFile
from builder.training.bodies import PlotBody
from builder.training.examples import Pack, Reader, Texts, split_off
from builder.training.finetuning import Ground, logits_of
from builder.training.history import Learned, learned_by
from builder.training.labelled import Example, Labelled, key_of
from builder.training.material import DEV_SHARE
from builder.training.model import TenantModel
from builder.training.tasks import TrainingTask, training_task
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig

Loss = Callable[[Pack, Tensor], Tensor]  # of a batch and its logits


class _LookedUp(NamedTuple):
    reader: Reader
    texts: Texts
    dev: Texts


class LevelMaterial:
    """Reads and looks up the data when the first level needs them, once for all levels."""

    def __init__(
        self, store: Store, tenant: TenantFile, seen: Sequence[Path], device: torch.device, show_progress: bool
    ) -> None:
        """`seen`: files of the training that were moved, and perhaps others."""
        self._store, self._tenant = store, tenant
        self._task = training_task(tenant.task)
        self._device, self._show_progress = device, show_progress
        self._learned = [learned for learned in learned_by(store, tenant, seen) if learned.train is not None]
        if not self._learned:
            raise InvalidInput(
                f"tenant {tenant.id!r} was imported and not trained here, so its training data are not known, and its levels "
                "have nothing to learn from: build it with `hplm build tenant`"
            )

    @cached_property
    def digests(self) -> list[str]:
        """The digests of all files."""
        return [digest_of(path) for learned in self._learned for path in (learned.train, learned.dev) if path is not None]

    def ground(self, config: BackboneConfig) -> Ground:
        """Returns what a level on a stack of this configuration is trained on."""
        return Ground(config, *self._looked_up, self._task, self._tenant.labels, self._device)

    @cached_property
    def soft_labels(self) -> Loss:
        """A loss beside that of the labels: the mean squared distance from the logits of the tenant's own level."""
        store, ground = self._store, self.ground(self._store.config)
        model = TenantModel(self._tenant.adapter_layout(store.config), self._tenant.head_layout(store.config), seed=0)
        model.load(*store.tenant_weights(self._tenant))
        body = PlotBody(store.upper().eval(), store.config.heads).to(self._device)
        found, _ = logits_of(body, model.to(self._device), ground, ground.texts)
        wanted_of = {id(text): logits for text, logits in zip(ground.texts.texts, found, strict=True)}
        _, spread = ground.task.scale(ground.texts.examples)

        def apart(pack: Pack, logits: Tensor) -> Tensor:
            wanted = torch.from_numpy(np.concatenate([wanted_of[id(text)] for text in pack.texts])).to(logits.device)
            return F.mse_loss(logits.float() / spread, wanted / spread)

        return apart

    @cached_property
    def _looked_up(self) -> _LookedUp:
        tenant, task = self._tenant, self._task
        reader = Reader(self._store, tenant.domain, tenant.domain_version)
        parts = gathered(task, self._learned)
        task.check(parts[0], tenant.dtype)
        return _LookedUp(reader, *(reader.read(part, task, tenant.labels, self._show_progress) for part in parts))


def gathered(task: TrainingTask, learned: Sequence[Learned]) -> tuple[Labelled, Labelled]:
    """Returns the training and the dev data of all these trainings, the newest of which is first.

    Each is divided as it was. Of a text that several of them have, the newest one counts.
    """
    known: set[tuple[str, ...]] = set()
    training: list[Example] = []
    dev: list[Example] = []
    for one in learned:
        parts = _divided(task, one)
        for examples, part in zip((training, dev), parts, strict=True):
            examples += [example for example in part.examples if key_of(example) not in known]
        known.update(key_of(example) for part in parts for example in part.examples)
    path = learned[0].train
    assert path is not None  # only such trainings are kept
    return Labelled(path, training), Labelled(path, dev)


def _divided(task: TrainingTask, learned: Learned) -> tuple[Labelled, Labelled]:
    assert learned.train is not None
    training = task.read(learned.train)
    if learned.dev is not None and learned.divided is None:
        return training, task.read(learned.dev)
    return split_off(training, DEV_SHARE, learned.divided)[:2]
