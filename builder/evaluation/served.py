"""Asks a running server, as any client does, and scores its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tqdm import tqdm

from builder.evaluation.tenant import Evaluation
from builder.tasks.scores import Scores
from builder.tasks.tasks import training_task
from hplm.errors import InvalidInput

TEXTS_AT_ONCE = 16


class Client(Protocol):
    """Asks the server, as `hplm_client.HplmClient` does. Returns an answer a text, with labels and the tenant's version."""

    def infer_batch(
        self, texts: Sequence[str], *, tenant: str, pairs: Sequence[str] | None, truncate: bool
    ) -> Sequence[Any]: ...


def score_served(client: Client, evaluation: Evaluation, show_progress: bool = True) -> Scores:
    tenant, examples = evaluation.tenant, evaluation.labelled.examples
    answers: list[list[str]] = [[]] * len(examples)
    # One request holds texts with a pair, or texts without.
    kinds = [[i for i, example in enumerate(examples) if (example.pair is not None) is paired] for paired in (False, True)]
    requests = [kind[start : start + TEXTS_AT_ONCE] for kind in kinds for start in range(0, len(kind), TEXTS_AT_ONCE)]
    for some in tqdm(requests, desc="asking", unit="request", disable=not show_progress):
        pairs = [pair for i in some if (pair := examples[i].pair) is not None] or None
        told = client.infer_batch([examples[i].text for i in some], tenant=tenant.id, pairs=pairs, truncate=True)
        for i, answer in zip(some, told, strict=True):
            _check_version(tenant.id, tenant.version, answer.version)
            answers[i] = list(answer.labels)
    return training_task(tenant.task).score(tenant.labels, examples, answers)


def _check_version(tenant_id: str, here: int, there: str) -> None:
    if there != str(here):
        raise InvalidInput(
            f"the server answers with version {there} of tenant {tenant_id!r}, the store's newest is {here}: "
            "`hplm tenant update` it, or export again (after a rollback a server's numbers are ahead of the store's)"
        )
