"""Makes checkpoints, roots and tenants, where they are missing, and stores a number for each task and case.

Several processes may do so at once, in one command or in several: each thing is made by the first that locks it.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from math import log
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

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

FIRST, MIXED = "imported", "mixed"
OF_MATCHING = "rank", "epochs", "learning_rate"  # options of a case that are among those of the matching too
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
class Case:
    """A way from a checkpoint to a tenant. What is not said is as in the first case."""

    about: str
    rank: int = 32
    times: int = 1  # as many texts, and as many tokens of them at most
    epochs: int | None = None
    learning_rate: float = MatchingOptions.learning_rate
    # own: those of the training, then its domain's. corpus: its domain's alone. like: those most like the training's.
    texts: Literal["own", "corpus", "like"] = "own"
    lower: int = 2  # layers in tables
    norms: bool = False  # norms and biases of the upper layers learn too. No tenant can hold them: it only tells what they add
    labelled: Mapping[str, float] | None = None  # the first case's tenant learns on with the labelled data, by these options


CASES = {
    FIRST: Case("without labels"),
    "labelled": Case("then with the labelled data", labelled={"epochs": 3, "learning_rate": 5e-4}),
    "rank-64": Case("rank 64", rank=64),
    "rate-3": Case("three times the learning rate", learning_rate=3e-3),
    "once": Case("one pass", epochs=1),
    "more-once": Case("three times the texts, one pass", times=3, epochs=1),
    "more": Case("three times the texts", times=3),
    "corpus": Case("texts of the domain's corpus alone", texts="corpus"),
    "like": Case("texts of all corpora that are most like its own", texts="like"),
    "norms": Case("norms and biases learn too", norms=True),
    "lower-1": Case("one layer fewer in tables", lower=1),
}


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

    def calls(self, cases: Sequence[str], mixed: int) -> list[Call]:
        """Returns what is missing. Trials come last, all of some tasks, if the time ends."""
        trials = [case for case in cases if case != FIRST and CASES[case].labelled is None]
        parts = [(task, case) for case in cases if case not in trials for task in self.data.tenants]
        parts += [(task, case) for task in self.data.tenants for case in trials]
        calls: list[Call] = [(f"{task.id}, {case}", partial(self.put, task, case)) for task, case in parts]
        calls += [(f"{MIXED} {number}", partial(self.put_mixed, number)) for number in range(mixed)]
        told = [*(self.told(*part) for part in parts), *map(self.told_mixed, range(mixed))]
        return [call for call, known in zip(calls, self.results.of(told), strict=True) if known is None]

    def told(self, task: DemoTenant, case: str) -> dict[str, Any]:
        """Returns everything that the result depends on."""
        about = {"task": task.id, "kind": task.task, "labels": len(task.labels), "case": case}
        about |= {"data": digest_of_files(task.train, task.dev, task.test), "matching": asdict(self._matching(CASES[case]))}
        own = {name: value for name, value in asdict(CASES[case]).items() if name not in ("about", *OF_MATCHING)}
        return about | {"options": own, "setting": self.setting}

    def told_mixed(self, number: int) -> dict[str, Any]:
        tasks = digest_of_files(*(task.train for task in self.data.tenants))
        matching = asdict(self._matching(CASES[FIRST]))
        return {"task": f"{MIXED}-{number}", "data": tasks, "case": MIXED, "matching": matching, "setting": self.setting}

    def put(self, task: DemoTenant, case: str) -> None:
        with self._alone(f"{task.id}-{FIRST if CASES[case].labelled else case}"):
            if self.results.get(told := self.told(task, case)) is None:
                self.results.put(told, self._labelled(task, case) if CASES[case].labelled else self._imported(task, case))

    def put_mixed(self, number: int) -> None:
        """Imports a mix of the checkpoints, which is removed then: two hundred would take many gigabytes."""
        with self._alone(name := f"{MIXED}-{number}"):
            if self.results.get(told := self.told_mixed(number)) is not None:
                return
            folder, tasks = self.home / name, self.data.tenants
            shutil.rmtree(folder, ignore_errors=True)
            place = mix(self.model, [(task.task, self.checkpoint(task)) for task in tasks], number, folder)
            report = self._import(tasks[place], name, folder, CASES[FIRST], test=None)
            self.results.put(told, {"agreement": report["after"]["agreement"], "took": report["took"], "head": tasks[place].id})
            shutil.rmtree(folder)

    def checkpoint(self, task: DemoTenant) -> Path:
        folder = self.home / "checkpoints" / task.id
        with self._alone(f"checkpoint-{task.id}"):
            if not folder.exists():
                finetune(self.model, task, folder, self.amounts.passes, self.device)
        return folder

    def store(self, lower: int) -> Store:
        folder = self.home / f"root-{lower}"
        with self._alone(folder.name):
            if not (folder / "plot/root/1/meta.json").exists():
                corpora = [domain.corpus for domain in self.data.domains]
                options = RootOptions(self.amounts.keep, name="imports", lower=lower)
                build_root(self.model, corpora, folder, options, Budget(self.amounts.minutes), self.device)
        return Store(folder)

    def _matching(self, case: Case) -> MatchingOptions:
        epochs = self.amounts.epochs if case.epochs is None else case.epochs
        return MatchingOptions(case.rank, epochs, case.learning_rate, most_texts=case.times * self.amounts.texts, least=0)

    def _import(self, task: DemoTenant, tenant_id: str, folder: Path, case: Case, test: Path | None) -> dict[str, Any]:
        store = self.store(case.lower)
        texts = UnlabelledTexts([self._texts(task, case)])
        given = store, tenant_id, folder, Family(store.model, store.config), texts, ImportOptions(test=test)
        made = _with_norms if case.norms else Model.of
        return import_checkpoint(*given, self._matching(case), self.device, made)[1]

    def _imported(self, task: DemoTenant, case: str) -> dict[str, Any]:
        own, name = CASES[case], f"{task.id}-{case}"
        store = self.store(own.lower)
        if own.norms and store.tenant_versions(name):  # stored before an interruption, and without what it learned
            store.remove_tenant(name)
        report = self._import(task, name, self.checkpoint(task), own, task.test)
        found = {**_shown(report), "took": report["took"], "before": report["before"], "held": report["change_held"]}
        found |= {"learned_from": report["texts"]["learned"], "bytes": report["bytes"]}
        root = read_json(store.folder / "lower" / "root-1.json")
        found["root"] = {"tokens": root["tokens"], "explained": root["exams"][-1]["score"], "seconds": root["seconds"]}
        if case == FIRST:
            folder = self.home / "exported" / task.id
            shutil.rmtree(folder, ignore_errors=True)
            examples = training_task(task.task).read(task.test)[: self.amounts.asked]
            found["exported"] = exported_back(store, store.known_tenant(name), folder, examples, self.device)
            shutil.rmtree(folder)
        return found

    def _labelled(self, task: DemoTenant, case: str) -> dict[str, Any]:
        store, name, checkpoint = self.store(CASES[FIRST].lower), f"{task.id}-{FIRST}", self.checkpoint(task)
        if not store.tenant_versions(name):
            self._import(task, name, checkpoint, CASES[FIRST], task.test)
        given = {"teacher": str(checkpoint), "device": self.device, **(CASES[case].labelled or {})}
        tenant = build_tenant(store, name, None, None, task.train, task.dev, **given)
        found, own = Family(store.model, store.config).read(checkpoint).with_labels(tenant.labels), training_task(tenant.task)
        sides = Model.of_tenant(store, tenant, self.device), Model.of_checkpoint(found, self.device)
        reader = Reader(store, tenant.domain, tenant.domain_version)
        scores = compared(*sides, own.read(task.test), reader, tenant.labels, own)
        return {**_shown(scores), "took": store.report(tenant)["seconds"]}

    def _texts(self, task: DemoTenant, case: Case) -> Path:
        """Returns a file of texts without labels; those of an import are drawn from it."""
        path = self.home / "texts" / f"{task.id}-{case.texts}-{case.times}.jsonl"
        with self._alone(path.stem):
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                texts = list(dict.fromkeys(self._chosen(task, case)))[: case.times * self.amounts.texts]
                with replaced(path) as temporary:
                    temporary.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
        return path

    def _chosen(self, task: DemoTenant, case: Case) -> list[str]:
        own = [example.text for example in training_task(task.task).read(task.train)]
        read = [domain.corpus for domain in self.data.domains if domain.name == task.domain or case.texts == "like"]
        lines = [line for path in read for line in path.read_text("utf-8").splitlines() if line.strip()]
        np.random.default_rng(0).shuffle(lines)
        if case.texts == "like":
            return sorted(lines, key=_likeness(own, lines), reverse=True)
        return [*own, *lines] if case.texts == "own" else lines

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


def _likeness(own: Sequence[str], others: Sequence[str]) -> Callable[[str], float]:
    """Returns a function that says how much likelier the words of a text are in some texts than in others, by its mean word."""
    counts = [Counter(word for text in part for word in text.lower().split()) for part in (own, others)]
    totals = [part.total() + len(counts[1]) for part in counts]

    def likeness(text: str) -> float:
        words = text.lower().split()
        mine, theirs = (
            sum(log((part[word] + 1) / total) for word in words) for part, total in zip(counts, totals, strict=True)
        )
        return (mine - theirs) / len(words)

    return likeness


def _with_norms(*given: Any) -> Model:
    """Makes a tenant's model whose body has norms and biases that learn with it."""
    model = Model.of(*given)
    named = model.body.upper_layers.named_parameters()
    model.own.further = nn.ParameterList([part for name, part in named if "norm" in name or name.endswith("bias")])
    return model
