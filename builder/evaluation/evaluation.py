"""Evaluates the newest version of a tenant on a labelled file: computed here, and as a running server answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    task, is_vector = training_task(tenant.task).of(tenant.embedding), tenant.embedding is not None
    # The number of an example, a text of it, and the text's pair or the name of its prefix.
    parts = [
        (number, *part)
        for number, one in enumerate(examples)
        for part in (task.compared_in(one) if is_vector else [(one.text, one.pair)])
    ]
    alike = defaultdict[str | None, list[int]](list)  # one request holds texts with a pair, or without, or with one prefix
    for at, (_, _, other) in enumerate(parts):
        alike[other if is_vector or other is None else "pair"].append(at)
    requests = [some[start : start + TEXTS_AT_ONCE] for some in alike.values() for start in range(0, len(some), TEXTS_AT_ONCE)]
    told: list[Any] = [None] * len(parts)
    for some in progress_bar(requests, "asking", unit="request"):
        _, texts, others = zip(*(parts[at] for at in some), strict=True)
        asked = {"embedding": True, "parameters": {"hplm_prefix": others[0]} if others[0] else {}}
        given = asked if is_vector else {"pairs": None if others[0] is None else others}
        for at, answer in zip(some, client.infer_batch(texts, tenant=tenant.id, truncate=True, **given), strict=True):
            _check_version(tenant, answer.version)
            told[at] = answer
    if is_vector:
        vectors: list[list[Array]] = [[] for _ in examples]
        for (number, *_), answer in zip(parts, told, strict=True):
            vectors[number].append(np.array(answer.embedding, dtype=np.float32))
        answers = [one.labels for one in task.answers([], examples, [(NOTHING, np.stack(own)) for own in vectors])]
    else:
        answers = [list(answer.labels) for answer in told]
    return replace(evaluation, answers=answers, scores=task.score(tenant.labels, examples, answers))


def _check_version(tenant: TenantVersion, answered: str) -> None:
    if answered != str(tenant.version):
        raise InvalidInput(
            f"the server answers with version {answered} of tenant {tenant.id!r}, the store's newest is {tenant.version}: "
            "`hplm tenant update` it, or export again (after a rollback a server's numbers are ahead of the store's)"
        )
