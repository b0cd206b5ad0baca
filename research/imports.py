"""`python -m research.imports`: fine-tunes BERTs in full by plain `transformers`, imports them, and compares both."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from bench.rows import Device, OtherModel, Positive
from bench.run import app_of
from builder.importing.adapter_import import ImportOptions
from builder.importing.checkpoint import Family
from builder.importing.matching import import_checkpoint
from builder.importing.options import Matching
from builder.importing.reports import facts_of, totals
from builder.importing.texts import UnlabelledTexts
from builder.learning.limits import Budget
from builder.packed_batches import packed_batches
from builder.store.store import Store, written_folder
from builder.tables.root import RootOptions, build_root
from builder.tasks.tasks import training_task
from demo.building import minilm
from demo.data import DemoTenant, stored, write_demo_data
from demo.documents import Docstring
from demo.domains import DOMAINS
from demo.tasks import TASKS, DefinedNames, DemoTask, Pair
from hplm.engine.engine import resolve_device
from hplm.errors import InvalidInput
from hplm.model.original import silent_transformers, tokenizer_of, weights_of
from research.options import run

QUESTIONS = {task.tenant: task for task in TASKS if task.task == "classify"}
SIZES = {"train": 2000, "dev": 300, "test": 1000}  # texts of each file, at most
PAIRS_OF = {"train": 600, "dev": 100, "test": 500}  # the same of embedding models
# Random numbers would take most of the time.
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FEWEST_WORDS, MOST_WORDS, SCALE = 3, 48, 20.0  # of each side of a pair; of cosines
MODULES = [
    {"path": "1_Pooling" if kind == "Pooling" else "", "type": f"sentence_transformers.models.{kind}"}
    for kind in ("Transformer", "Pooling", "Normalize")
]
PASSES, RATE, WARM_UP, BATCH_TEXTS = 3, 5e-5, 0.1, 16  # of fine-tuning, as papers on BERT do it

app = app_of("python -m research.imports", __doc__)


@dataclass(frozen=True)
class Imported:
    store: Store
    checkpoint: Path
    report: dict[str, Any]  # of the import


def _summary(document: Docstring) -> tuple[str, str]:
    """A docstring's first sentence, and the rest."""
    text, _, rest = document.text.partition(". ")
    return text, rest


def _halves(document: Docstring) -> tuple[str, str]:
    words = document.text.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def _names(document: Docstring) -> tuple[str, str]:
    """What is defined, and its description."""
    place = f"{document.definition.module.removesuffix('.py')} {document.definition.qualified_name}"
    return " ".join(re.findall(r"[A-Z]?[a-z]+", place)), document.description


PAIRS: dict[str, Callable[[Docstring], tuple[str, str]]] = {"summary": _summary, "halves": _halves, "names": _names}


def _pair(cut: Callable[[Docstring], tuple[str, str]], document: Docstring, names: DefinedNames) -> Pair | None:
    text, positive = (" ".join(part.split()[:MOST_WORDS]) for part in cut(document))
    return Pair(text, positive) if min(len(text.split()), len(positive.split())) >= FEWEST_WORDS else None


SEARCHES = [
    DemoTask(f"{domain.name}-{kind}", domain.name, "embed", f"which text belongs to it ({kind})?", partial(_pair, cut))
    for domain in DOMAINS
    for kind, cut in PAIRS.items()
]


@app.default
def imports(
    *, task: str = "web-library", vectors: bool = False, lower: int = 2, keep: float = 0.1, minutes: Positive = 4.0,
    steps: int | None = None, work: Path = Path(".hplm/imports"), model: OtherModel = "", device: Device = "auto",
) -> None:  # fmt: skip
    """Prints the scores of the checkpoint and of the tenant. The same command goes on after an interruption.

    :param task: a question of the demo that has one label a text
    :param vectors: instead of a question, twelve embedding models on one root
    :param lower: layers of the root that are in tables
    :param keep: share of the n-grams in the table
    :param minutes: of adapting the root
    :param steps: instead of minutes
    :param work: folder of the data, the checkpoints and the store
    """
    if not vectors and task not in QUESTIONS:
        raise InvalidInput(f"unknown task {task!r}: choose from {', '.join(QUESTIONS)}")
    tasks: list[DemoTask] = SEARCHES if vectors else [QUESTIONS[task]]
    home, on = work / ("vectors" if vectors else task), resolve_device(device)
    domains = [domain for domain in DOMAINS if domain.name in {one.domain for one in tasks}]
    sizes = PAIRS_OF if vectors else SIZES
    data = stored(home, {"sizes": sizes}, lambda: write_demo_data(home, domains, tasks, sizes, further=True))
    options, budget = RootOptions(keep, name="imports", lower=lower), Budget(minutes) if steps is None else Budget(steps=steps)
    corpora, reports = [domain.corpus for domain in data.domains], list[dict[str, Any]]()
    for tenant in data.tenants:
        found = imported(model or str(minilm()), tenant, corpora, home, options, budget, on)
        reports.append(found.report)
        print(f"tenant {tenant.id} is in {found.store.folder}, its checkpoint in {found.checkpoint}")
        for name, value in facts_of(found.report).items():
            print(f"  {name}: {value}")
    if vectors:
        together = totals(reports)
        share = together["bytes"]["checkpoint"] / together["bytes"]["tenant"]
        print(f"mean cosine {together['agreement']:.4f} (target 0.98), nDCG@10 lost {together['score_lost']:.4f} (target 0.01)")
        print(f"bytes of a tenant: 1/{share:.1f} of its checkpoint's (target 1/40)")


def imported(
    model: str, task: DemoTenant, corpora: Sequence[Path], home: Path, options: RootOptions, budget: Budget,
    device: torch.device,
) -> Imported:  # fmt: skip
    """Makes the checkpoint, the root and the tenant, where they are missing. Returns the import's report with both scores."""
    checkpoint = home / f"{task.id}-checkpoint"
    length = f"{budget.minutes:g}-minutes" if budget.steps is None else f"{budget.steps}-steps"
    folder = home / f"store-{options.lower}-{options.keep:g}-{length}"
    if not checkpoint.exists():
        (finetune_vectors if task.task == "embed" else finetune)(model, task, checkpoint, device)
    store, _ = build_root(model, [*corpora], folder, options, budget, device)
    own = next((corpus for corpus in corpora if corpus.parent.name == task.domain), corpora[0])
    given = Family(store.model, store.config), UnlabelledTexts([task.train, own], are_documents=True)
    matching = Matching(least=0)
    _, report = import_checkpoint(store, task.id, checkpoint, *given, ImportOptions(test=task.test), matching, device)
    return Imported(store, checkpoint, report)


def finetune(source: str, task: DemoTenant, folder: Path, device: torch.device) -> None:
    """Fine-tunes all weights of a classifier by `transformers` alone, and saves the checkpoint."""
    tokenizer, labels = tokenizer_of(source), list(task.labels)
    number_of = {label: number for number, label in enumerate(labels)}
    torch.manual_seed(0)
    names = {"num_labels": len(labels), "id2label": dict(enumerate(labels)), "label2id": number_of}
    model, _ = weights_of(source, silent_transformers().AutoModelForSequenceClassification, **names, **WITHOUT_DROPOUT)
    examples = training_task(task.task).read(task.train)
    encoded = _encoded(tokenizer, [example.text for example in examples], model)
    targets = torch.tensor([number_of[example.labels[0]] for example in examples], device=device)

    def loss(batch: np.ndarray) -> torch.Tensor:
        given = tokenizer.pad({"input_ids": [encoded[i] for i in batch]}, return_tensors="pt").to(device)
        return model(**given, labels=targets[batch]).loss

    _learn(model, [*map(len, encoded)], BATCH_TEXTS, loss, device)
    with written_folder(folder) as writing:
        model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)


def finetune_vectors(source: str, task: DemoTenant, folder: Path, device: torch.device) -> None:
    """Fine-tunes all weights of an embedding model, and saves it as sentence-transformers does."""
    tokenizer = tokenizer_of(source)
    torch.manual_seed(0)
    model, _ = weights_of(source, silent_transformers().AutoModel, **WITHOUT_DROPOUT)
    examples = training_task(task.task).read(task.train)
    both = [one.text for one in examples], [one.pair or "" for one in examples]
    sides = [_encoded(tokenizer, texts, model) for texts in both]

    def vectors(side: list[list[int]], batch: np.ndarray) -> torch.Tensor:
        given = tokenizer.pad({"input_ids": [side[i] for i in batch]}, return_tensors="pt").to(device)
        mask = given["attention_mask"][..., None]
        return F.normalize((model(**given).last_hidden_state * mask).sum(1) / mask.sum(1), dim=1)

    def loss(batch: np.ndarray) -> torch.Tensor:
        texts, positives = (vectors(side, batch) for side in sides)
        return F.cross_entropy(SCALE * texts @ positives.T, torch.arange(len(batch), device=device))

    lengths = [len(one) + len(other) for one, other in zip(*sides, strict=True)]
    _learn(model, lengths, 2 * BATCH_TEXTS, loss, device)
    with written_folder(folder) as writing:
        model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)
        (writing / "1_Pooling").mkdir()
        for name, content in {"modules.json": MODULES, "1_Pooling/config.json": {"pooling_mode_mean_tokens": True}}.items():
            (writing / name).write_text(json.dumps(content), "utf-8")


def _encoded(tokenizer: Any, texts: Sequence[str], model: Any) -> list[list[int]]:
    cut = {"truncation": True, "max_length": min(tokenizer.model_max_length, model.config.max_position_embeddings)}
    return [tokenizer(text, **cut)["input_ids"] for text in texts]


def _learn(
    model: Any, lengths: Sequence[int], batch_texts: int, loss: Callable[[np.ndarray], torch.Tensor], device: torch.device
) -> None:
    rng = np.random.default_rng(0)
    batches = [batch for _ in range(PASSES) for batch in packed_batches(np.array(lengths), batch_texts, rng)]
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = silent_transformers().get_linear_schedule_with_warmup(optimizer, round(WARM_UP * len(batches)), len(batches))
    for batch in batches:
        loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


main = partial(run, app)

if __name__ == "__main__":
    sys.exit(main())
