"""How well a decoder predicts texts: what its tables and upper layers say of each next token, and what the whole model says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from builder.console import passing_bar
from builder.learning.bodies import checkpoint_of
from builder.learning.causal import WholeDecoder, entropies, predicting
from builder.learning.loop import half_precision, products_dtype
from builder.learning.windows import in_packs, index_of
from builder.packed_batches import positions_of
from builder.store.store import Store
from hplm.errors import InvalidInput
from hplm.model.attention import CausalAttention
from hplm.model.stacks import through, turn_of
from hplm.model.tensors import sent
from hplm.plot.gathering import Gatherer


@dataclass(frozen=True)
class Predicted:
    """The cross-entropies of some documents' next tokens."""

    losses: np.ndarray  # of each document, summed up
    tokens: np.ndarray  # that were predicted
    levels: tuple[float, ...] = ()  # share of windows by how often they were shortened, whole ones first

    @property
    def perplexity(self) -> float:
        return math.exp(self.losses.sum() / self.tokens.sum())

    def over(self, other: Predicted) -> tuple[float, float]:
        """Returns this perplexity over another one of the same documents, and its standard error, by document."""
        tokens = self.tokens.sum()
        difference = self.losses - other.losses
        mean = difference.sum() / tokens
        error = math.sqrt(float(((difference - mean * self.tokens) ** 2).sum())) / tokens
        return math.exp(mean), math.exp(mean) * error


class Predictor:
    """Predicts with a domain's tables."""

    def __init__(self, store: Store, domain: str, version: int, device: torch.device) -> None:
        if not store.config.is_decoder:
            raise InvalidInput(f"backbone {store.config.name!r} is an encoder, which predicts no next token")
        self._forest = store.forest(domain, version)
        self._chain = self._forest.chain(domain, version)
        self._gatherer = Gatherer(torch.device("cpu"), torch.float32)
        self._config, self._device = store.config, device
        self._upper = store.upper().to(device).eval().requires_grad_(False)
        self._matrix = self._upper.next_token.weight.to(products_dtype(device))

    @torch.inference_mode()
    def predicted(self, documents: Sequence[np.ndarray]) -> Predicted:
        levels = np.zeros(len(self._chain.space.masks), dtype=np.int64)

        def read_of(tokens: np.ndarray, lengths: np.ndarray, positions: Tensor, rows: Tensor) -> Tensor:
            nonlocal levels
            hits = self._chain.lookup(tokens, lengths)
            levels += np.bincount(hits.levels, minlength=len(levels))
            sums = sent(self._gatherer.sums(self._forest, hits.addresses, lengths), self._device)
            entered, attend = self._upper.enter(sums, positions), CausalAttention(lengths.tolist(), self._config.heads)
            turn = turn_of(self._config, positions, entered.dtype)
            return self._upper.final_norm(through(self._upper.layers, entered, attend, rows=rows, turn=turn))

        found = _predicted(documents, read_of, self._matrix, self._device)
        return replace(found, levels=tuple(round(share, 4) for share in (levels / levels.sum()).tolist()))


@torch.inference_mode()
def predicted_by_whole(store: Store, documents: Sequence[np.ndarray], device: torch.device) -> Predicted:
    checkpoint = checkpoint_of(store.model, store.config)
    whole, matrix = WholeDecoder(checkpoint, device), checkpoint.weights["next_token.weight"].to(device, products_dtype(device))

    def read_of(tokens: np.ndarray, lengths: np.ndarray, positions: Tensor, rows: Tensor) -> Tensor:
        _, read = whole.states(index_of(tokens, device), positions, lengths.tolist(), rows)
        assert read is not None
        return read

    return _predicted(documents, read_of, matrix, device)


Read = Callable[
    [np.ndarray, np.ndarray, Tensor, Tensor], Tensor
]  # tokens, lengths, positions, rows -> what logits are made from


def _predicted(documents: Sequence[np.ndarray], read_of: Read, matrix: Tensor, device: torch.device) -> Predicted:
    order = sorted(range(len(documents)), key=lambda i: len(documents[i]))
    losses, counts = np.zeros(len(documents)), np.array([len(document) - 1 for document in documents])
    done = 0
    for texts in passing_bar(in_packs([documents[i] for i in order]), "predicting", unit="batch"):
        tokens, lengths = np.concatenate(texts), np.array([len(text) for text in texts])
        before = predicting(lengths)
        positions, rows, following = (
            index_of(numbers, device) for numbers in (positions_of(lengths), before, tokens[before + 1])
        )
        with half_precision(device):
            found = entropies(read_of(tokens, lengths, positions, rows), matrix, following).double().cpu().numpy()
        ends = np.cumsum(lengths - 1)
        losses[order[done : done + len(texts)]] = np.add.reduceat(found, ends - (lengths - 1))
        done += len(texts)
    return Predicted(losses, counts)
