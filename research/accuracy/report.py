"""Runs every case of a study on every task with every seed, where there is no result yet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from bench.turns import threads
from builder.console import no_progress_bars
from builder.learning.bodies import PlotBody, WholeBody
from builder.learning.loop import products_dtype
from builder.store.resumable import digest_of
from builder.store.store import FORMAT as STORE_FORMAT
from builder.store.store import Store
from builder.tasks.tasks import training_task
from builder.training.data import Data
from builder.training.finetuning import TrainingOptions, evaluate, finetune
from builder.worker_processes import BYTES_EACH
from demo.data import DemoData, DemoTenant
from hplm.plot.meta import FORMAT as TABLE_FORMAT
from research.accuracy.recipes import Recipe, build_store, pretrained_body
from research.accuracy.studies import Study, StudyCase, Tier, studies_of, tenants_of
from research.options import results_of
from research.result_file import ResultFile
from research.schemes.teachers import taught_by_dedicated
from research.schemes.trained import options_of, read_task, train_scheme
from testing.processes import processes_that_fit

OF_UPPER_LAYERS = ("adapter", "dedicated-lower", "dedicated-upper")  # their results depend on the number of upper layers
BARE = 0.001  # share of the n-grams in a root whose table is not read
RANKING = 2  # raised when the same share keeps other n-grams: earlier results are void then
LATER = ("function", "head_function", "embedding")  # options of training younger than results: named if not at their defaults
FEW = ("maths-area", "learning-names")  # the tasks of most studies: the largest one, and one that tags


@dataclass(frozen=True)
class StudyRun:
    """A number to compute: the score of a case on one task with one seed."""

    task: DemoTenant
    case: StudyCase
    seed: int
    sample: int = 0  # texts, drawn with replacement by the seed; 0: all texts of the task


@dataclass(frozen=True)
class AccuracyReport:
    name: str  # name of the model in results
    model: str
    layers: int
    data: DemoData
    tier: Tier
    work: Path  # folder of the stores: large, and needed only to continue an interrupted report
    results: ResultFile
    device: torch.device
    few: tuple[str, ...] = FEW

    @cached_property
    def studies(self) -> dict[str, Study]:
        return studies_of(self.tier, self.layers)

    def finished(self, study: Study) -> list[dict[str, Any]]:
        """Returns the runs that have a result, with it, in the order of tasks, cases and seeds."""
        return [
            {"task": run.task.id, "kind": run.task.task, "case": run.case.label, "seed": run.seed, **result}
            for run, result in self._found(study)
            if result is not None
        ]

    def size(self, study: Study) -> int:
        return len(self._found(study))

    def _found(self, *studies: Study) -> list[tuple[StudyRun, dict[str, Any] | None]]:
        """Returns all runs, and their results."""
        runs = [run for study in studies for run in self._runs(study)]
        return [*zip(runs, self.results.of(map(self._told, runs)), strict=True)]

    def run(self, studies: Sequence[Study], at_a_time: int | None = None) -> None:
        """Computes all missing results. Each training has one thread, because its result depends on the number of threads."""
        missing = [*{repr(self._told(run)): run for run, result in self._found(*studies) if result is None}.values()]
        order = {case: number for number, case in enumerate(case for study in studies for case in study.cases)}
        missing.sort(key=lambda run: (run.seed, order[run.case]))  # one seed is finished before the next begins
        self._build(missing)
        at_a_time = at_a_time or (1 if self.device.type != "cpu" else processes_that_fit(len(missing), BYTES_EACH))
        score = AccuracyReport.score if at_a_time == 1 and self.device.type != "cpu" else _score_alone
        with tqdm(total=len(missing), desc="report", unit="training", disable=not missing) as bar:
            for place, result in results_of([partial(score, self, run) for run in missing], at_a_time):
                run = missing[place]
                self.results.put(self._told(run), result)
                bar.set_postfix_str(f"{run.task.id}, {run.case.label}: {result[result['metric']]:.3f}")
                bar.update()

    def _runs(self, study: Study) -> Iterator[StudyRun]:
        tasks = [task for task in self.data.tenants if not study.few_tasks or task.id in self.few]
        seeds: list[Sequence[int]] = [self.tier.seeds] * len(tasks)
        if study.tenants:
            sizes = [len(training_task(task.task).read(task.train)) for task in tasks]
            seeds = list(map(range, tenants_of(sizes, study.tenants)))
        sample = self.tier.tenant_texts if study.tenants else 0
        for task, own in zip(tasks, seeds, strict=True):
            yield from (StudyRun(task, case, seed, sample) for case in study.cases for seed in own)

    def _told(self, run: StudyRun) -> dict[str, Any]:
        """Returns everything that the result depends on, and nothing else."""
        task, case, recipe = run.task, run.case, run.case.recipe
        told = {"task": task.id, "domain": task.domain, "kind": task.task, "model": self.name}
        told |= {"data": self._digests[task.id], "scheme": case.scheme, "seed": run.seed}
        told |= {"training": named_options(options_of(case.scheme, self._training(run)))}
        if case.scheme in OF_UPPER_LAYERS or case.pretrained not in ("", "all"):
            told |= {"upper": self._bare.upper}
        if recipe is not None:
            told |= {"recipe": recipe.described}
        if case.pretrained:
            told |= {"pretrained": {"part": case.pretrained, "minutes": self.tier.whole_minutes}}
        if recipe is not None or case.pretrained:
            read = self._corpora if recipe is not None else [task.domain]
            told |= {"corpora": digest_of(*(self._corpora[name] for name in read))}
        if recipe is not None and min(recipe.keep, recipe.root_keep) < 1:  # it matters which n-grams a table has
            told |= {"ranked": RANKING}
        if case.teacher:
            told |= {"teacher": case.teacher}
        return told | ({"sample": run.sample} if run.sample else {})

    @cached_property
    def _corpora(self) -> dict[str, Path]:
        """Returns the corpora of the domains, by name. The root reads all."""
        return {domain.name: domain.corpus for domain in self.data.domains}

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Digests of the tasks' data. The data come from installed packages, so they differ between machines."""
        return {task.id: digest_of(task.train, task.dev, task.test) for task in self.data.tenants}

    @cached_property
    def home(self) -> Path:
        """The folder of the stores. It changes with the corpora, the model, the formats and the way of making stores."""
        made_of = [self.name, self.model, digest_of(*self._corpora.values()), STORE_FORMAT, TABLE_FORMAT, RANKING]
        return self.work / hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]

    def _store(self, recipe: Recipe, domain: str) -> Store:
        """Returns the store of a recipe, with a table for the domain."""
        given = self.model, [*self._corpora.values()], self._corpora[domain], self.device
        return build_store(self.home / "stores", recipe.plain, domain, *given)

    def _training(self, run: StudyRun) -> TrainingOptions:
        case = run.case
        options = self.tier.training(case.scheme, self.layers, self._recipe(case).upper, run.seed)
        if case.longer == 1:
            return options
        epochs = round(case.longer * options.epochs)
        return replace(options, epochs=epochs, patience=epochs)

    @cached_property
    def _bare(self) -> Recipe:
        """The recipe of a whole BERT: it reads texts like an hPLM, but needs no tables, so its root is a small one."""
        ours = next(case.recipe for case in self.studies["schemes"].cases if case.recipe is not None)
        return replace(ours.root, root_minutes=0, root_keep=BARE, root_largest=BARE)

    def _recipe(self, case: StudyCase) -> Recipe:
        return case.recipe or self._bare

    def _build(self, runs: Sequence[StudyRun]) -> None:
        for run in runs:
            self._store(self._recipe(run.case), run.task.domain)
        for part, domain in dict.fromkeys((run.case.pretrained, run.task.domain) for run in runs):
            if part:
                self._pretrained(part, domain)

    @no_progress_bars()
    def score(self, run: StudyRun) -> dict[str, Any]:
        task, case, recipe = run.task, run.case, self._recipe(run.case)
        store = self._store(recipe, task.domain)
        data, texts = read_task(store, task, (recipe.branch(task.domain), 1), self.device)
        if run.sample:
            data = _resampled(data, run.sample, run.seed)
        body = self._pretrained(case.pretrained, task.domain) if case.pretrained else None
        trainer = taught_by_dedicated if case.teacher else finetune
        trained = train_scheme(store, data, case.scheme, self._training(run), body, trainer=trainer)
        scores, _ = evaluate(trained.body, trained.model, data, texts)
        told = {"dev": round(trained.scores.main, 4), "trained_on": len(data.train.texts)}
        told |= {name: trained.report[name] for name in ("epochs_run", "best_epoch", "kept_epoch", "seconds")}
        told |= {"products": str(products_dtype(self.device)).removeprefix("torch."), "device": self.device.type}
        if case.teacher:
            told |= {"teacher": trained.report["teacher"]}
        if isinstance(trained.body, PlotBody):
            told |= {"root": digest_of(store.folder / "upper.safetensors"), "windows_found": texts.window_shares}
        return {**scores.described(), **told}

    def _pretrained(self, part: str, domain: str) -> WholeBody:
        store, minutes = self._store(self._bare, domain), self.tier.whole_minutes
        folder = self.home / "pretrained" / f"{domain}-{part}-{store.config.upper_layers}-{minutes:g}"
        return pretrained_body(store, part, minutes, self._corpora[domain], folder, self.device)


def named_options(options: TrainingOptions) -> dict[str, Any]:
    """Returns the options as results name them. A new option at its default changes no result, and is left out."""
    return {
        name: value
        for name, value in asdict(options).items()
        if name not in LATER or value != TrainingOptions.__dataclass_fields__[name].default
    }


def _score_alone(report: AccuracyReport, run: StudyRun) -> dict[str, Any]:
    with threads(1):
        return report.score(run)


def _resampled(data: Data, count: int, seed: int) -> Data:
    """Returns the task's training data with a bootstrap sample of its texts (HMI's Eq. 5)."""
    texts = data.train
    drawn = np.random.default_rng([seed, count]).integers(len(texts.texts), size=count)
    sample = replace(texts, texts=[texts.texts[i] for i in drawn])
    return replace(data, train=sample)
