"""Evaluates the newest version of a tenant on a labelled file: computed here, and as a running server answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from builder.console import progress_bar
from builder.learning.bodies import PlotBody
from builder.store.store import Store, TenantVersion
from builder.students.team import served
from builder.tasks.columns import AS_TRAINED, Columns
from builder.tasks.examples import Example
from builder.tasks.labels import check_labels
from builder.tasks.lookup import Reader, Texts
from builder.tasks.nearest import NOTHING
from builder.tasks.scores import Scores
from builder.tasks.tasks import TrainingTask, training_task
from builder.training.data import Data
from builder.training.finetuning import Answering, logits_of
from builder.training.model import TenantModel
from hplm.arrays import Array
from hplm.engine.engine import Precision
from hplm.errors import InvalidInput
from hplm.tenants.knowledge import TenantKnowledge

TEXTS_AT_ONCE = 16  # in a request

Answers = list[list[str]]  # of texts: the labels of their rows


@dataclass(frozen=True)
class Evaluation:
    tenant: TenantVersion
    texts: Texts
    answers: Answers
    scores: Scores


def evaluate_tenant(
    store: Store, tenant_id: str, test: Path | Sequence[Example], device: torch.device, eight_bits: bool = False,
    members: int | None = None, columns: Columns = AS_TRAINED,
) -> Evaluation:  # fmt: skip
    """`test`: a file, or what was read of it. `eight_bits`: computes the shared products in 8 bits, on the CPU.

    `members`: how many of its students answer, if it has some; 0: the full stack; None: all.
    """
    tenant = store.known_tenant(tenant_id)
    named = columns.after(store.report(tenant))
    examples = training_task(tenant.task).read(test, named) if isinstance(test, Path) else test
    check_labels(examples, tenant.labels, f"the training data of tenant {tenant_id!r}")
    return evaluate_weights(store, tenant, store.knowledge(tenant), examples, device, eight_bits, members)


def evaluate_weights(
    store: Store, tenant: TenantVersion, found: TenantKnowledge, examples: Sequence[Example], device: torch.device,
    eight_bits: bool = False, members: int | None = None,
) -> Evaluation:  # fmt: skip
    """Evaluates a tenant that need not be stored yet."""
    body, model, data = opened(store, found, examples, device, Precision(torch.float32, eight_bits))
    answering: Answering = model
    if found.students is not None and members != 0:
        answering = served(found.students.members[:members], found.students.students.depth, device)
    answers = data.answers(data.dev, logits_of(body, answering, data, data.dev))
    scores = data.task.score(tenant.labels, examples, answers)
    return Evaluation(tenant, data.dev, answers, scores)


def opened(
    store: Store, found: TenantKnowledge, examples: Sequence[Example], device: torch.device, precision: Precision,
    task: TrainingTask | None = None,
) -> tuple[PlotBody, TenantModel, Data]:  # fmt: skip
    """Returns a tenant ready to answer texts as it is served, and the texts, looked up. `task`: if not the tenant's own."""
    reader, labels = Reader(store, found.domain, found.domain_version), [*found.labels]
    task = task or training_task(found.task).of(found.embedding)
    texts = reader.read(examples, task, labels)
    body, model = PlotBody.of(store, precision), TenantModel.of(found.adapter, found.head, found.embedding)
    return body.to(device), model.to(device), Data(reader, task, labels, texts, texts, device)


def evaluate_served(client: Any, evaluation: Evaluation) -> Evaluation:
    """Evaluates a server's answers. `client`: an `hplm_client.HplmClient`."""
    tenant, examples = evaluation.tenant, evaluation.texts.examples
    if tenant.embedding is not None:
        return _vectors_served(client, evaluation)
    answers: Answers = [[]] * len(examples)
    # One request holds texts with a pair, or texts without.
    kinds = [[i for i, example in enumerate(examples) if (example.pair is not None) is paired] for paired in (False, True)]
    requests = [kind[start : start + TEXTS_AT_ONCE] for kind in kinds for start in range(0, len(kind), TEXTS_AT_ONCE)]
    for some in progress_bar(requests, "asking", unit="request"):
        pairs = [pair for i in some if (pair := examples[i].pair) is not None] or None
        told = client.infer_batch([examples[i].text for i in some], tenant=tenant.id, pairs=pairs, truncate=True)
        for i, answer in zip(some, told, strict=True):
            _check_version(tenant, answer.version)
            answers[i] = list(answer.labels)
    return replace(evaluation, answers=answers, scores=training_task(tenant.task).score(tenant.labels, examples, answers))


def _vectors_served(client: Any, evaluation: Evaluation) -> Evaluation:
    tenant, examples = evaluation.tenant, evaluation.texts.examples
    task = training_task(tenant.task).of(tenant.embedding)
    asked = [(number, *part) for number, example in enumerate(examples) for part in task.compared_in(example)]
    vectors: list[list[Array]] = [[] for _ in examples]
    alike = [list(some) for _, some in groupby(asked, key=lambda one: one[2])]  # neighbours with one prefix
    requests = [some[start : start + TEXTS_AT_ONCE] for some in alike for start in range(0, len(some), TEXTS_AT_ONCE)]
    for some in progress_bar(requests, "asking", unit="request"):
        named = {"hplm_prefix": some[0][2]} if some[0][2] else {}
        texts = [text for _, text, _ in some]
        for (number, *_), answer in zip(
            some, client.infer_batch(texts, tenant=tenant.id, truncate=True, embedding=True, parameters=named), strict=True
        ):
            _check_version(tenant, answer.version)
            vectors[number].append(np.array(answer.embedding, dtype=np.float32))
    found = task.answers([], examples, [(NOTHING, np.stack(own)) for own in vectors])
    answers = [one.labels for one in found]
    return replace(evaluation, answers=answers, scores=task.score([], examples, answers))


def _check_version(tenant: TenantVersion, answered: str) -> None:
    if answered != str(tenant.version):
        raise InvalidInput(
            f"the server answers with version {answered} of tenant {tenant.id!r}, the store's newest is {tenant.version}: "
            "`hplm tenant update` it, or export again (after a rollback a server's numbers are ahead of the store's)"
        )
