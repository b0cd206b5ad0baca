"""How well a decoder's tenant predicts targets behind their prompts, beside the original model as it was.

A line without a prompt is plain text: its perplexity says what tables of windows cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from builder.learning.bodies import PlotBody, WholeBody
from builder.learning.causal import entropies
from builder.learning.loop import half_precision
from builder.store.store import Store, TenantVersion
from builder.tasks.examples import Example
from builder.tasks.lookup import Pack, Texts
from builder.tasks.tasks import training_task
from builder.training.data import Data
from builder.training.generating import NextTokenLoss, PromptReader, WrittenData
from builder.training.model import TenantModel
from hplm.tasks.tasks import GENERATE


@dataclass(frozen=True)
class Predicted:
    """The cross-entropies of the tokens of some targets."""

    losses: np.ndarray  # of each target, summed up
    tokens: np.ndarray  # that each has

    @property
    def perplexity(self) -> float:
        return math.exp(self.losses.sum() / self.tokens.sum())

    def over(self, other: Predicted) -> tuple[float, float]:
        """Returns this perplexity over another one of the same targets, and its standard error, by target."""
        tokens, difference = self.tokens.sum(), self.losses - other.losses
        mean = difference.sum() / tokens
        error = math.sqrt(float(np.square(difference - mean * self.tokens).sum())) / tokens
        return math.exp(mean), math.exp(mean) * error


class Predictor:
    """Predicts the same targets by a tenant and by the original model."""

    def __init__(self, store: Store, tenant: TenantVersion, examples: Sequence[Example], device: torch.device) -> None:
        self._store, self._tenant, task = store, tenant, training_task(GENERATE)
        reader = PromptReader(store, tenant.domain, tenant.domain_version)
        self.texts: Texts = reader.read(examples, task, [])
        self._body = PlotBody.of(store).eval().to(device).requires_grad_(False)
        self._data = WrittenData.of(Data(reader, task, [], self.texts, self.texts, device), self._body.upper.next_token.weight)

    def by_tenant(self) -> Predicted:
        """As the tables, the shared layers and the tenant's adapter predict."""
        model = TenantModel.of(self._store.knowledge(self._tenant).adapter, None).to(self._data.device)
        return self._predicted(partial(model, self._body))

    def by_original(self) -> Predicted:
        """As the whole model predicts, without an adapter."""
        whole = WholeBody.of(self._store).to(self._data.device)
        return self._predicted(partial(whole, adapters=None))

    @torch.no_grad()
    def _predicted(self, read: Callable[[Pack], Tensor]) -> Predicted:
        loss = self._data.task.loss
        assert isinstance(loss, NextTokenLoss)
        losses, tokens = (np.zeros(len(self.texts.texts)) for _ in range(2))
        for chosen, pack in self._data.packs(self.texts, "predicting"):
            with half_precision(self._data.device):
                found = entropies(read(pack), loss.matrix, pack.targets).double().cpu()
            losses[chosen] = [float(part.sum()) for part in found.split(pack.rows_of)]
            tokens[chosen] = pack.rows_of
        return Predicted(losses, tokens)
