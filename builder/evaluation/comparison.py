"""Baselines beside a tenant: their answers, which are kept, and how far their scores are from the tenant's, paired by text."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from builder.console import bars_of
from builder.evaluation.evaluation import Answers, Evaluation
from builder.store.resumable import read_json, write_json
from builder.store.store import Store
from builder.tasks.scores import Scores
from builder.tasks.tasks import training_task

GROUPS = 20  # of texts, each of which is left out once

Run = tuple[str, int]  # a baseline and the seed of its training
Rival = Callable[..., Iterator[Answers]]  # as `hplm.registered` says


@dataclass(frozen=True)
class Compared:
    """The scores of a baseline: of several seeds, their means."""

    scores: Scores
    difference: float  # of the deciding metric, from the tenant's
    off: float  # its standard error, over texts and seeds; infinite of a single text
    seeds: int

    def described(self) -> dict[str, Any]:
        off = round(self.off, 4) if math.isfinite(self.off) else None
        return {**self.scores.described(), "difference": round(self.difference, 4), "off": off, "seeds": self.seeds}

    def __str__(self) -> str:
        return f"{self.difference:+.4f} +- {self.off:.4f}"


def compared(evaluation: Evaluation, runs: Sequence[Answers]) -> Compared:
    """Compares the answers of a baseline with the tenant's to the same texts. `runs`: of each seed."""
    labels, examples = evaluation.tenant.labels, evaluation.texts.examples
    task, order = training_task(evaluation.tenant.task), np.random.default_rng(0).permutation(len(examples))

    def scores(answers: Answers, texts: np.ndarray) -> Scores:
        return task.score(labels, [examples[i] for i in texts], [answers[i] for i in texts])

    def differences(texts: np.ndarray) -> np.ndarray:
        return np.array([scores(run, texts).main for run in runs]) - scores(evaluation.answers, texts).main

    groups = np.array_split(order, min(GROUPS, len(order)))
    without = [differences(np.setdiff1d(order, group)).mean() for group in groups if len(group) < len(order)]
    over_texts = (len(groups) - 1) * np.var(without) if without else math.inf  # a jackknife
    over_seeds = np.var(differences(order), ddof=1) / len(runs) if len(runs) > 1 else 0.0
    found = [scores(run, order) for run in runs]
    means = {name: float(np.mean([one.values[name] for one in found])) for name in found[0].values}
    off = math.sqrt(over_texts + over_seeds)
    return Compared(Scores(found[0].rows, found[0].metric, means), float(differences(order).mean()), off, len(runs))


def baselines(
    store: Store, evaluation: Evaluation, rivals: Mapping[str, Rival], seeds: int, device: torch.device, train: Path | None,
    dev: Path | None,
) -> Iterator[tuple[str, Compared]]:  # fmt: skip
    """Yields each baseline, once it is trained with all seeds. Those that an earlier call has trained are not trained again."""
    kept, first = _Kept.of(store, evaluation), store.report(evaluation.tenant).get("seed", 0)
    for rival in dict.fromkeys(rivals.values()):
        names = [name for name in rivals if rivals[name] is rival]
        runs = {name: [(name, seed) for seed in range(first, first + seeds)] for name in names}
        missing = [run for name in names for run in runs[name] if kept.answers(run) is None]
        trained = rival(store, evaluation, missing, device, train, dev)
        for name in names:
            for run in runs[name]:
                if run in missing:
                    with bars_of(name if seeds == 1 else f"{name}, seed {run[1]}"):
                        kept.keep(run, next(trained))
            yield name, compared(evaluation, [found for run in runs[name] if (found := kept.answers(run)) is not None])


@dataclass(frozen=True)
class _Kept:
    """Keeps the answers of baselines in a folder beside the versions of a tenant. The folder is removed with them."""

    folder: Path

    @classmethod
    def of(cls, store: Store, evaluation: Evaluation) -> _Kept:
        """Returns what baselines with the training of this version answered to these texts."""
        tenant, texts = evaluation.tenant, [replace(one, file=Path(), line=0) for one in evaluation.texts.examples]
        name = hashlib.sha256(repr([store.report(tenant).get("asked"), texts]).encode()).hexdigest()[:16]
        return cls(store.tenant_folder(tenant.id, tenant.version).parent / "baselines" / name)

    def answers(self, run: Run) -> Answers | None:
        return read_json(file)["answers"] if (file := self._file(run)).exists() else None

    def keep(self, run: Run, answers: Answers) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self._file(run), {"answers": answers})

    def _file(self, run: Run) -> Path:
        name, seed = run
        return self.folder / f"{name}-{seed}.json"
