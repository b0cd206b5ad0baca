"""Trains the schemes of `hplm evaluate --against` beside a tenant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from builder.evaluation.evaluation import Answers, Evaluation
from builder.store.store import Store
from research.schemes.decoders import score_decoders
from research.schemes.trained import score_schemes


def score(
    store: Store, evaluation: Evaluation, runs: Sequence[tuple[str, int]], device: torch.device, train: Path | None,
    dev: Path | None,
) -> Iterator[Answers]:  # fmt: skip
    """Yields what each scheme answers with each seed, as `hplm.registered` says."""
    of = score_decoders if store.config.is_decoder else score_schemes
    return of(store, evaluation, runs, device, train, dev)
