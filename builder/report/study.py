"""Runs what has no result yet: every task with every scheme and seed; stores are built only if something is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from builder.adaptation.learning import Budget
from builder.data import read_labelled
from builder.demo.data import DemoData, DemoTenant
from builder.domain import DomainOptions, build_domain
from builder.evaluation.schemes import train_scheme
from builder.report.results import Results, digest_of
from builder.report.tiers import Tier
from builder.root import RootOptions, build_root
from builder.store import Store
from builder.tenant import Material
from builder.training.examples import check_labels
from builder.training.finetuning import TrainingOptions, evaluate


@dataclass(frozen=True)
class Study:
    model: str
    data: DemoData
    tier: Tier
    work: Path  # stores; large, and of no more use than to go on from
    results: Results
    device: torch.device

    def run(self, show_progress: bool = True) -> list[dict[str, Any]]:
        """Every run with its result, in the order of tasks, schemes, seeds."""
        planned = list(self._planned())
        missing = [(tenant, run) for tenant, run in planned if self.results.get(run) is None]
        for tenant, run in tqdm(missing, desc="report", unit="training", disable=not (show_progress and missing)):
            self.results.put(run, self._score(tenant, run["scheme"], run["seed"]))
        return [{**run, **self.results.get(run)} for _, run in planned]

    def _planned(self) -> Iterator[tuple[DemoTenant, dict[str, Any]]]:
        corpora = digest_of(*(domain.corpus for domain in self.data.domains))
        built = {name: getattr(self.tier, name) for name in ("root_minutes", "domain_minutes", "learn")}
        for tenant in self.data.tenants:
            told = {"task": tenant.id, "domain": tenant.domain, "kind": tenant.task, "model": Path(self.model).name}
            told |= {"data": digest_of(tenant.train, tenant.dev, tenant.test), "corpora": corpora, **built}
            for scheme in self.tier.schemes:
                for seed in self.tier.seeds:
                    yield tenant, {**told, "scheme": scheme, "seed": seed, "training": asdict(self._options(seed))}

    def _options(self, seed: int) -> TrainingOptions:
        return TrainingOptions(epochs=self.tier.epochs, seed=seed)

    def _score(self, tenant: DemoTenant, scheme: str, seed: int) -> dict[str, Any]:
        store = self._store(tenant.domain)
        version = store.latest(tenant.domain)
        material = Material(store.folder, tenant.domain, version, tenant.task, tenant.train, tenant.dev, seed)
        ground, _ = material.open(self.device)
        labelled = read_labelled(tenant.test, tenant.task)
        check_labels(labelled, ground.labels, str(tenant.train))
        texts = ground.reader.read(labelled, tenant.task, ground.labels, show_progress=False)
        trained = train_scheme(store, ground, scheme, self._options(seed), show_progress=False)
        scores, _ = evaluate(trained.body, trained.model, ground, texts)
        return {**scores.described(), "texts": len(ground.texts.texts), "seconds": trained.report["seconds"]}

    def _store(self, domain: str) -> Store:
        """With the root and this domain, built if they are not there; cut anywhere, the next run goes on."""
        corpora = {found.name: found.corpus for found in self.data.domains}
        folder = self.work / "store"
        if not (folder / "plot/root/1").exists():
            budget = Budget(minutes=self.tier.root_minutes)
            build_root(self.model, list(corpora.values()), folder, RootOptions(name="report"), budget, self.device)
        store = Store(folder)
        if not store.table_folder(domain, 1).exists():
            options, budget = DomainOptions(learn=self.tier.learn), Budget(minutes=self.tier.domain_minutes)
            build_domain(store, domain, [corpora[domain]], options, budget, self.device)
        return store
