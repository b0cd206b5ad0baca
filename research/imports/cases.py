"""Makes checkpoints, roots and tenants, where they are missing, and stores a number for each task and case.

Several processes may do so at once, in one command or in several: each thing is made by the first that locks it.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.turns import threads
from builder.importing.checkpoint import Family
from builder.importing.matching import MatchingOptions, Model, compared, import_checkpoint
from builder.importing.tenant import ImportOptions
from builder.importing.texts import UnlabelledTexts
from builder.learning.limits import Budget
from builder.said import no_progress_bars
from builder.store.resumable import digest_of as digest_of_files
from builder.store.resumable import read_json, replaced
from builder.store.store import Store
from builder.tables.root import RootOptions, build_root
from builder.tasks.lookup import Reader
from builder.tasks.tasks import training_task
from builder.training.tenant import build_tenant
from demo.data import DemoData, DemoTenant
from research.imports.checkpoints import exported_back, finetune, mix
from research.result_file import ResultFile, digest_of

FIRST, LABELLED, MIXED = "imported", "labelled", "mixed"
CASES = {FIRST: "without labels", LABELLED: "then with the labelled data"}  # ways from a checkpoint to a tenant
RANK, LOWER = 32, 2  # of a tenant; layers in tables
OF_LABELS = {"epochs": 3, "learning_rate": 5e-4}  # with which the first case's tenant learns on
Call = tuple[str, Callable[[], object]]  # with its name


@dataclass(frozen=True)
class Amounts:
    train: int = 2000  # texts of a task, at most
    dev: int = 300
    test: int = 1000
    passes: int = 3  # over them, of fine-tuning
    minutes: float = 15.0  # of adapting a root
    keep: float = 0.1  # share of the n-grams in its table
    texts: int = 3000  # that an import reads
    epochs: int = 3
    asked: int = 300  # texts that `transformers` answers after an export


QUICK = Amounts(train=60, dev=20, test=30, passes=1, minutes=0.01, keep=0.01, texts=60, epochs=1, asked=5)


@dataclass(frozen=True)
class Imports:
    """The tasks and all that their numbers depend on. It can be sent to another process."""

    name: str  # of the model in results
    model: str
    data: DemoData
    amounts: Amounts
    work: Path
    results: ResultFile
    device: torch.device

    @cached_property
    def setting(self) -> dict[str, Any]:
        corpora = digest_of_files(*(domain.corpus for domain in self.data.domains))
        return {"model": self.name, "corpora": corpora, "device": self.device.type, **asdict(self.amounts)}

    @cached_property
    def home(self) -> Path:
        return self.work / digest_of(self.setting)

    def calls(self, mixed: int) -> list[Call]:
        """Returns what is missing."""
        parts = [(task, case) for case in CASES for task in self.data.tenants]
        calls: list[Call] = [(f"{task.id}, {case}", partial(self.put, task, case)) for task, case in parts]
        calls += [(f"{MIXED} {number}", partial(self.put_mixed, number)) for number in range(mixed)]
        told = [*(self.told(*part) for part in parts), *map(self.told_mixed, range(mixed))]
        return [call for call, known in zip(calls, self.results.of(told), strict=True) if known is None]

    def told(self, task: DemoTenant, case: str) -> dict[str, Any]:
        """Returns everything that the result depends on."""
        about = {"task": task.id, "kind": task.task, "labels": len(task.labels), "case": case}
        about |= {"data": digest_of_files(task.train, task.dev, task.test), "matching": asdict(self._matching)}
        # As when other ways were tried.
        own = {"times": 1, "texts": "own", "lower": LOWER, "norms": False, "labelled": OF_LABELS if case == LABELLED else None}
        return about | {"options": own, "setting": self.setting}

    def told_mixed(self, number: int) -> dict[str, Any]:
        tasks = digest_of_files(*(task.train for task in self.data.tenants))
        return {
            "task": f"{MIXED}-{number}",
            "data": tasks,
            "case": MIXED,
            "matching": asdict(self._matching),
            "setting": self.setting,
        }

    def put(self, task: DemoTenant, case: str) -> None:
        with self._alone(f"{task.id}-{FIRST}"):
            if self.results.get(told := self.told(task, case)) is None:
                self.results.put(told, self._labelled(task) if case == LABELLED else self._imported(task))

    def put_mixed(self, number: int) -> None:
        """Imports a mix of the checkpoints, which is removed then: two hundred would take many gigabytes."""
        with self._alone(name := f"{MIXED}-{number}"):
            if self.results.get(told := self.told_mixed(number)) is not None:
                return
            folder, tasks = self.home / name, self.data.tenants
            shutil.rmtree(folder, ignore_errors=True)
            place = mix(self.model, [(task.task, self.checkpoint(task)) for task in tasks], number, folder)
            report = self._import(tasks[place], name, folder, test=None)
            self.results.put(told, {"agreement": report["after"]["agreement"], "took": report["took"], "head": tasks[place].id})
            shutil.rmtree(folder)

    def checkpoint(self, task: DemoTenant) -> Path:
        folder = self.home / "checkpoints" / task.id
        with self._alone(f"checkpoint-{task.id}"):
            if not folder.exists():
                finetune(self.model, task, folder, self.amounts.passes, self.device)
        return folder

    def store(self) -> Store:
        folder = self.home / "root"
        with self._alone(folder.name):
            if not (folder / "plot/root/1/meta.json").exists():
                corpora = [domain.corpus for domain in self.data.domains]
                options = RootOptions(self.amounts.keep, name="imports", lower=LOWER)
                build_root(self.model, corpora, folder, options, Budget(self.amounts.minutes), self.device)
        return Store(folder)

    @property
    def _matching(self) -> MatchingOptions:
        return MatchingOptions(RANK, self.amounts.epochs, most_texts=self.amounts.texts, least=0)

    def _import(self, task: DemoTenant, tenant_id: str, folder: Path, test: Path | None) -> dict[str, Any]:
        store, texts = self.store(), UnlabelledTexts([self._texts(task)])
        given = store, tenant_id, folder, Family(store.model, store.config), texts, ImportOptions(test=test)
        return import_checkpoint(*given, self._matching, self.device)[1]

    def _imported(self, task: DemoTenant) -> dict[str, Any]:
        store, name = self.store(), f"{task.id}-{FIRST}"
        report = self._import(task, name, self.checkpoint(task), task.test)
        found = {**_shown(report), "took": report["took"], "before": report["before"], "held": report["change_held"]}
        found |= {"learned_from": report["texts"]["learned"], "bytes": report["bytes"]}
        root = read_json(store.folder / "lower" / "root-1.json")
        found["root"] = {"tokens": root["tokens"], "explained": root["exams"][-1]["score"], "seconds": root["seconds"]}
        folder = self.home / "exported" / task.id
        shutil.rmtree(folder, ignore_errors=True)
        examples = training_task(task.task).read(task.test)[: self.amounts.asked]
        found["exported"] = exported_back(store, store.known_tenant(name), folder, examples, self.device)
        shutil.rmtree(folder)
        return found

    def _labelled(self, task: DemoTenant) -> dict[str, Any]:
        store, name, checkpoint = self.store(), f"{task.id}-{FIRST}", self.checkpoint(task)
        if not store.tenant_versions(name):
            self._import(task, name, checkpoint, task.test)
        given = {"teacher": str(checkpoint), "device": self.device, **OF_LABELS}
        tenant = build_tenant(store, name, None, None, task.train, task.dev, **given)
        found, own = Family(store.model, store.config).read(checkpoint).with_labels(tenant.labels), training_task(tenant.task)
        sides = Model.of_tenant(store, tenant, self.device), Model.of_checkpoint(found, self.device)
        reader = Reader(store, tenant.domain, tenant.domain_version)
        scores = compared(*sides, own.read(task.test), reader, tenant.labels, own)
        return {**_shown(scores), "took": store.report(tenant)["seconds"]}

    def _texts(self, task: DemoTenant) -> Path:
        """Returns a file of texts without labels, those of the training and then of its domain. An import draws from it."""
        path = self.home / "texts" / f"{task.id}.jsonl"
        with self._alone(path.stem):
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                (corpus,) = [domain.corpus for domain in self.data.domains if domain.name == task.domain]
                lines = [line for line in corpus.read_text("utf-8").splitlines() if line.strip()]
                np.random.default_rng(0).shuffle(lines)
                own = [example.text for example in training_task(task.task).read(task.train)]
                texts = list(dict.fromkeys([*own, *lines]))[: self.amounts.texts]
                with replaced(path) as temporary:
                    temporary.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
        return path

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Waits until no other process makes this."""
        path = self.home / "locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@no_progress_bars()
def tried(call: Callable[[], object]) -> str:
    """Calls it with one thread, on whose number results depend. Returns what went wrong, so that other calls go on."""
    try:
        with threads(1):
            call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _shown(report: Mapping[str, Any]) -> dict[str, Any]:
    scores, metric = report["test"], report["test"]["tenant"]["metric"]
    return {"metric": metric, **{side: scores[side][metric] for side in ("checkpoint", "tenant")}, **report["tested"]}
