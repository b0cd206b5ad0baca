"""HMI's Table 3 for one tenant: trains other schemes on its data, with the same budget.

`distil` learns labels and the answers of the tenant's dedicated BERT, as DistilBERT does. `tiny-half` and `tiny-third` first
learn its hidden states, as TinyBERT does, but not its attention scores. Such a student starts from evenly chosen layers of its
teacher, and reads no text but the tenant's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from builder.evaluation.evaluation import Answers, Evaluation
from builder.learning.bodies import Body, PlotBody, WholeBody
from builder.learning.distil import WAY_OUT
from builder.learning.limits import Budget
from builder.learning.loop import ParameterGroup, Training, train
from builder.learning.progress import Exam
from builder.store.resumable import digest_of
from builder.store.store import Store, TenantVersion
from builder.tasks.columns import AS_TRAINED
from builder.tasks.labels import check_labels
from builder.tasks.lookup import Reader, Texts
from builder.training.data import Data, read_data
from builder.training.finetuning import Train, Trained, TrainingOptions, finetune, logits_of
from demo.data import DemoTenant
from hplm.errors import InvalidInput
from research.schemes.export import evenly

HEAD_RATE = 1e-3  # of a head without an adapter, or with a body that also learns


@dataclass(frozen=True)
class Scheme:
    body_rate: float = 0.0
    body_part: str = "all"
    adapter: bool = False
    kept: float = 1.0  # share of the layers; below 1, a dedicated BERT teaches them
    states: bool = False  # the hidden states are taught first


SCHEMES = {
    "dedicated": Scheme(5e-5),  # all weights of the original BERT tuned
    "dedicated-lower": Scheme(5e-5, body_part="lower"),  # its embeddings and lower layers tuned
    "dedicated-upper": Scheme(5e-5, body_part="upper"),  # its upper layers tuned
    "shared": Scheme(),  # the original BERT unchanged, only a head tuned
    "adapter": Scheme(adapter=True),  # adapter and head on the original BERT, no tables
    "distil": Scheme(5e-5, kept=1 / 2),  # half of the layers, taught by answers
    "tiny-half": Scheme(5e-5, kept=1 / 2, states=True),  # half of the layers, taught by hidden states too
    "tiny-third": Scheme(5e-5, kept=1 / 3, states=True),  # a third of them
    "plot": Scheme(1e-4),  # tables below, all upper layers tuned
}


def score_schemes(
    store: Store,
    evaluation: Evaluation,
    runs: Sequence[tuple[str, int]],
    device: torch.device,
    train_file: Path | None = None,
    dev_file: Path | None = None,
) -> Iterator[Answers]:
    """Trains schemes with the data and the budget of the tenant's report, and yields what each answers to the texts.

    `runs`: schemes and seeds. Pass the files if they were moved.
    """
    tenant, report = evaluation.tenant, store.report(evaluation.tenant)
    if others := {name for name, _ in runs} - SCHEMES.keys():
        raise InvalidInput(f"--against {min(others)} is for decoders: choose from {', '.join(SCHEMES)}")
    if not tenant.rank and any(name == "adapter" for name, _ in runs):
        raise InvalidInput(f"--against adapter: tenant {tenant.id!r} has a head and no adapter: give --against shared")
    train_file, dev_file = training_files(tenant, report, train_file, dev_file)
    options = own_options(report)
    reader = Reader(store, tenant.domain, tenant.domain_version)
    columns = AS_TRAINED.after(report)
    data = read_data(reader, tenant.task, train_file, dev_file, device, tenant, options.dtype, columns=columns)
    texts = data.reader.read(evaluation.texts.examples, data.task, tenant.labels)
    for name, seed in runs:
        trained = train_scheme(store, data, name, replace(options, seed=seed))
        yield data.answers(texts, logits_of(trained.body, trained.model, data, texts))


def training_files(
    tenant: TenantVersion, report: dict[str, Any], train_file: Path | None, dev_file: Path | None
) -> tuple[Path, Path | None]:
    """Returns the files that a tenant learned, or raises. Pass them if they were moved."""
    if "training" not in report:
        raise InvalidInput(f"tenant {tenant.id!r} was imported and not trained here: leave out --against")
    if start := report.get("from_version"):
        raise InvalidInput(
            f"tenant {tenant.id!r} was trained on version {start}, and the others would learn only its last data: leave out "
            "--against, or build the tenant on all data with --fresh"
        )
    train_file = train_file or Path(report["training"]["file"])
    if dev_file is None and report["asked"]["dev"] is not None:
        dev_file = Path(report["dev"]["file"])
    for option, part, file in (("train", "training", train_file), ("dev", "dev", dev_file)):
        if file is not None and not (file.exists() and report[part].get("digest") == digest_of(file)):
            raise InvalidInput(
                f"{file} is missing, or has changed since tenant {tenant.id!r} was trained with it: name the original with "
                f"--{option}, or build the tenant again"
            )
    return train_file, dev_file


def own_options(report: dict[str, Any]) -> TrainingOptions:
    """Returns the options that a tenant was trained with."""
    known = TrainingOptions.__dataclass_fields__
    own: dict[str, Any] = {name: value for name, value in report.items() if name in known}
    return TrainingOptions(**{**own, "places": tuple(own["places"]) if own["places"] else None})


def read_task(
    store: Store, task: DemoTenant, place: tuple[str, int], device: torch.device, most: int = 0
) -> tuple[Data, Texts]:
    """Reads a task as a table sees it: its data, of which `most` texts for each part, and all texts of its test."""
    data = read_data(Reader(store, *place), task.task, task.train, task.dev, device)
    if most:
        data = replace(data, train=data.train.first(most), dev=data.dev.first(most))
    labelled = data.task.read(task.test)
    check_labels(labelled, data.labels, str(task.train))
    return data, data.reader.read(labelled, data.task, data.labels)


def train_scheme(
    store: Store,
    data: Data,
    name: str,
    own: TrainingOptions,
    body: Body | None = None,
    trainer: Train = finetune,
) -> Trained:
    """Trains one of SCHEMES, or `hplm`, with the options of an hPLM that apply to it.

    `body`: another body than the scheme's. `trainer`: of all that have no teacher.
    """
    if name in SCHEMES and (scheme := SCHEMES[name]).kept < 1:
        return distilled(WholeBody.of(store), data, options_of(name, own), scheme.kept, scheme.states)
    return trainer(body or body_of(store, name), data, options_of(name, own))


def body_of(store: Store, name: str) -> Body:
    return PlotBody.of(store) if name in ("hplm", "plot") else WholeBody.of(store)


def options_of(name: str, own: TrainingOptions) -> TrainingOptions:
    """Returns the training options of a scheme that is compared with an hPLM with the options `own`."""
    if name == "hplm" or (scheme := SCHEMES[name]).adapter:
        return own
    bare = replace(own, adapter=TrainingOptions.adapter, rank=0, places=None, learning_rate=HEAD_RATE)
    return replace(bare, body_rate=scheme.body_rate, body_part=scheme.body_part)


def distilled(body: WholeBody, data: Data, options: TrainingOptions, kept: float, states: bool) -> Trained:
    """Trains a dedicated BERT and then its student with this share of the layers, each with the same options.

    `states`: the student first learns the teacher's hidden states, for as many passes over the texts.
    """
    teacher = finetune(body, data, options)
    assert isinstance(teacher.body, WholeBody)
    layers = len(teacher.body.layers)
    student = teacher.body.with_layers(evenly(layers, max(1, round(kept * layers))))
    if states:
        learn_states(student, teacher.body, data, options)

    taught = logits_of(teacher.body, teacher.model, data, data.train)

    def apart(chosen: np.ndarray, logits: Tensor) -> Tensor:
        """Returns the mean squared distance from the teacher's logits. It is the same loss for every task."""
        wanted = torch.from_numpy(np.concatenate([taught[i] for i in chosen])).to(logits.device)
        return F.mse_loss(logits.float(), wanted)

    return finetune(student, data, options, further=apart)


def learn_states(student: WholeBody, teacher: WholeBody, data: Data, options: TrainingOptions) -> None:
    """Moves each of the student's hidden states towards that of the teacher's layers which it replaces."""
    layers = len(teacher.layers)
    teacher = teacher.with_layers(range(layers))  # whose states are told after each layer
    ends = [0, *(round((i + 1) * layers / len(student.layers)) for i in range(len(student.layers)))]
    chosen = list(chain.from_iterable(data.batches(options.epochs, options.batch_texts, options.seed)))

    def loss_of(some: np.ndarray) -> tuple[Tensor, int]:
        pack = data.reader.pack(data.train, some, data.device)
        with torch.no_grad():
            wanted = teacher.states(pack, None)
        pairs = zip(student.states(pack, None), ends, strict=True)
        apart = [F.mse_loss(own.float(), wanted[end].float()) for own, end in pairs]
        return torch.stack(apart).sum(), len(pack.tokens)

    learned = ParameterGroup(
        options.body_rate, {str(number): parameter for number, parameter in enumerate(student.parameters())}
    )
    training = Training(
        "learning the teacher's states", data.device, [learned], lambda number: iter(chosen[number:]), loss_of,
        lambda: Exam(0.0, 0.0), WAY_OUT,
    )  # fmt: skip
    train(training, Budget(steps=len(chosen)))
