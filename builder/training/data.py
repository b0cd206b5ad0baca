"""The data of a tenant's training: its files divided and looked up, and the weights that it starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from builder.console import passing_bar
from builder.packed_batches import packed_batches
from builder.store.seen import SeenTexts
from builder.store.store import NO_TEXTS, TenantVersion
from builder.store.version import Weights
from builder.tables.text_files import digest_of_files
from builder.tasks.columns import AS_TRAINED, Columns
from builder.tasks.division import seen_after, split_again, split_off
from builder.tasks.labels import check_labels, check_new_labels, head_labels
from builder.tasks.lookup import Pack, Reader, Texts
from builder.tasks.scores import Scores
from builder.tasks.tasks import Rows, TrainingTask, training_task
from hplm.model.config import BackboneConfig
from hplm.tenants.embedding import Embedding

DEV_SHARE = 0.1
UNLIKELY = 4.0  # by which the logit of a new label is at first below the mean of the others


@dataclass(frozen=True)
class Data:
    """The texts of a training, the same for every option and body. They can be sent to another process."""

    reader: Reader
    task: TrainingTask
    labels: list[str]  # of the head's rows
    train: Texts
    dev: Texts
    device: torch.device
    start: Weights | None = None  # the adapter and the head to train on; None: random ones
    seen: SeenTexts = NO_TEXTS  # of this training, and by the start

    @property
    def config(self) -> BackboneConfig:
        return self.reader.store.config

    def batches(self, epochs: int, most_texts: int, seed: int, among: np.ndarray | None = None) -> list[list[np.ndarray]]:
        """Returns the training texts of each batch, by their numbers, of each epoch. `among`: some of them; None: all."""
        rng = np.random.default_rng(seed)
        return [list(self._packed(self.train, most_texts, rng, among)) for _ in range(epochs)]

    def _packed(
        self, texts: Texts, most: int | None = None, rng: np.random.Generator | None = None, among: np.ndarray | None = None
    ) -> Iterator[np.ndarray]:
        """Yields the numbers of the texts of each batch. Texts whose vectors are compared stay together, and count as one."""
        if self.task.embedding is not None:
            parts = np.split(np.arange(len(texts.texts)), texts.starts[1:])
            lengths = np.add.reduceat(texts.lengths, texts.starts)
            yield from (np.concatenate([parts[i] for i in own]) for own in packed_batches(lengths, most, rng))
            return
        numbers = np.arange(len(texts.texts)) if among is None else among
        yield from (numbers[part] for part in packed_batches(texts.lengths[numbers], most, rng))

    def packs(self, texts: Texts, title: str = "scoring") -> Iterator[tuple[np.ndarray, Pack]]:
        """Yields all texts in batches: their numbers, and the texts."""
        for chosen in passing_bar(list(self._packed(texts)), title, unit="batch"):
            yield chosen, self.reader.pack(texts, chosen, self.device)

    @torch.no_grad()
    def by_text(self, texts: Texts, compute: Callable[[Pack], Tensor]) -> list[Tensor]:
        """Returns what is computed of the rows of each text."""
        found: list[Tensor] = [torch.empty(0)] * len(texts.texts)
        for chosen, pack in self.packs(texts):
            for i, part in zip(chosen, compute(pack).float().cpu().split(pack.rows_of), strict=True):
                found[i] = part
        return found

    def rows(self, texts: Texts, logits: Sequence[np.ndarray]) -> list[Rows]:
        """Returns spans and logits of each example, over all its windows. `logits`: of each text's rows."""
        parts = [slice(*ends) for ends in pairwise([*texts.starts.tolist(), len(logits)])]
        return [(np.concatenate([text.spans for text in texts.texts[part]]), np.concatenate(logits[part])) for part in parts]

    def answers(self, texts: Texts, logits: Sequence[np.ndarray]) -> list[list[str]]:
        """Returns the labels that a client would get, example by example."""
        return [one.labels for one in self.task.answers(self.labels, texts.examples, self.rows(texts, logits))]

    def scored(self, texts: Texts, logits: Sequence[np.ndarray]) -> Scores:
        return self.task.score(self.labels, texts.examples, self.answers(texts, logits))


def read_data(
    reader: Reader, task: str, train: Path, dev: Path | None, device: torch.device,
    known: TenantVersion | None = None, dtype: str = "fp16", start: TenantVersion | None = None, again: bool = False,
    columns: Columns = AS_TRAINED, embedding: Embedding | None = None, new_labels: bool = False,
) -> Data:  # fmt: skip
    """Reads, checks and looks up the data of a training. Without a dev file, a part of the training file becomes one.

    `known`: the version before, whose labels and their order the head keeps. `dtype`: of the stored head. `start`: the version
    to train on. `again`: the file is divided as it was for that version. `new_labels`: whether it may have labels that `known`
    lacks.
    """
    own = training_task(task).of(embedding)
    if new_labels:
        check_new_labels(task)
    training = own.read(train, columns)
    labels = head_labels(known, task, training, own.labels(training), start is not None, new_labels)
    before = reader.store.seen(start) if start is not None else NO_TEXTS
    if dev is not None:
        check_labels(held := own.read(dev, columns), labels, str(train))
    else:
        training, held = (split_again if again else split_off)(training, DEV_SHARE, before)
    if own.check is not None:
        own.check(training, dtype)
    learned, judged = (reader.read(part, own, labels) for part in (training, held))
    weights = None
    if start is not None:
        adapter, head = reader.store.tenant_weights(start)
        weights = adapter, with_rows(head, len(labels)) if head else head
    return Data(reader, own, labels, learned, judged, device, weights, seen_after(before, training, held))


def with_rows(head: Mapping[str, Tensor], labels: int) -> dict[str, Tensor]:
    """Returns a head that has behind its rows those of new labels. No text has a new label before it is learned.

    A new row is the mean of the others, with a lower bias.
    """
    more = labels - len(head["bias"])
    weight, bias = (head[name].float().mean(0).to(head[name].dtype) for name in ("weight", "bias"))
    new = {"weight": weight.expand(more, -1), "bias": (bias - UNLIKELY).expand(more)}
    return {**head, **{name: torch.cat([head[name], own]) for name, own in new.items()}}


def file_of(part: Mapping[str, Any], moved: Sequence[Path] = ()) -> Path | None:
    """Returns the file of a part of a version's report. None: it was moved or changed since. `moved`: where it may be now."""
    if (file := next((path for path in moved if digest_of_files(path) == part["digest"]), None)) is not None:
        return file
    path = Path(part["file"])
    return path if path.is_file() and digest_of_files(path) == part["digest"] else None
