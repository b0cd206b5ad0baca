"""`python -m research.imports`: fine-tunes a BERT in full by plain `transformers`, imports it, and compares both."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.rows import Device, OtherModel, Positive
from bench.run import app_of
from builder.importing.adapter_import import ImportOptions
from builder.importing.checkpoint import Family
from builder.importing.matching import MatchingOptions, import_checkpoint
from builder.importing.reports import facts_of
from builder.importing.texts import UnlabelledTexts
from builder.learning.limits import Budget
from builder.packed_batches import packed_batches
from builder.store.store import Store, written_folder
from builder.tables.root import RootOptions, build_root
from builder.tasks.tasks import training_task
from demo.building import minilm
from demo.data import DemoTenant, stored, write_demo_data
from demo.domains import DOMAINS
from demo.tasks import TASKS
from hplm.engine.engine import resolve_device
from hplm.errors import InvalidInput
from hplm.model.original import silent_transformers, tokenizer_of, weights_of
from research.options import run

QUESTIONS = {task.tenant: task for task in TASKS if task.task == "classify"}
SIZES = {"train": 2000, "dev": 300, "test": 1000}  # texts of each file, at most
PASSES, RATE, WARM_UP, BATCH_TEXTS = 3, 5e-5, 0.1, 16  # of fine-tuning, as papers on BERT do it

app = app_of("python -m research.imports", __doc__)


@dataclass(frozen=True)
class Imported:
    store: Store
    checkpoint: Path
    report: dict[str, Any]  # of the import


@app.default
def imports(
    *, task: str = "web-library", minutes: Positive = 4.0, work: Path = Path(".hplm/imports"), model: OtherModel = "",
    device: Device = "auto",
) -> None:  # fmt: skip
    """Prints the scores of the checkpoint and of the tenant. The same command goes on after an interruption.

    :param task: a question of the demo that has one label a text
    :param minutes: of adapting the root, two of whose layers are in tables
    :param work: folder of the data, the checkpoint and the store
    """
    if (asked := QUESTIONS.get(task)) is None:
        raise InvalidInput(f"unknown task {task!r}: choose from {', '.join(QUESTIONS)}")
    home, on = work / task, resolve_device(device)
    domains = [domain for domain in DOMAINS if domain.name == asked.domain]
    data = stored(home, {"sizes": SIZES}, lambda: write_demo_data(home, domains, [asked], SIZES, further=True))
    (tenant,), (domain,) = data.tenants, data.domains
    found = imported(model or str(minilm()), tenant, domain.corpus, home, minutes, on)
    for name, value in facts_of(found.report).items():
        print(f"{name}: {value}")
    print(f"tenant {task} is in {found.store.folder}, its checkpoint in {found.checkpoint}")


def imported(model: str, task: DemoTenant, corpus: Path, home: Path, minutes: float, device: torch.device) -> Imported:
    """Makes the checkpoint, the root and the tenant, where they are missing. Returns the import's report with both scores."""
    checkpoint, folder = home / "checkpoint", home / "store"
    if not checkpoint.exists():
        finetune(model, task, checkpoint, device)
    if not (folder / "plot/root/1/meta.json").exists():
        build_root(model, [corpus], folder, RootOptions(0.1, name="imports", lower=2), Budget(minutes), device)
    store = Store(folder)
    given = Family(store.model, store.config), UnlabelledTexts([task.train, corpus], are_documents=True)
    matching = MatchingOptions(least=0)
    _, report = import_checkpoint(store, task.id, checkpoint, *given, ImportOptions(test=task.test), matching, device)
    return Imported(store, checkpoint, report)


def finetune(source: str, task: DemoTenant, folder: Path, device: torch.device) -> None:
    """Fine-tunes all weights by `transformers` alone, and saves the checkpoint."""
    tokenizer, labels = tokenizer_of(source), list(task.labels)
    number_of = {label: number for number, label in enumerate(labels)}
    torch.manual_seed(0)
    names = {"num_labels": len(labels), "id2label": dict(enumerate(labels)), "label2id": number_of}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # random numbers would take most of the time
    model, _ = weights_of(source, silent_transformers().AutoModelForSequenceClassification, **names, **without)
    examples = training_task(task.task).read(task.train)
    cut = {"truncation": True, "max_length": min(tokenizer.model_max_length, model.config.max_position_embeddings)}
    encoded = [tokenizer(example.text, **cut)["input_ids"] for example in examples]
    targets = torch.tensor([number_of[example.labels[0]] for example in examples], device=device)
    lengths, rng = np.array([*map(len, encoded)]), np.random.default_rng(0)
    batches = [batch for _ in range(PASSES) for batch in packed_batches(lengths, BATCH_TEXTS, rng)]
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = silent_transformers().get_linear_schedule_with_warmup(optimizer, round(WARM_UP * len(batches)), len(batches))
    for batch in batches:
        given = tokenizer.pad({"input_ids": [encoded[i] for i in batch]}, return_tensors="pt").to(device)
        model(**given, labels=targets[batch]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with written_folder(folder) as writing:
        model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)


main = partial(run, app)

if __name__ == "__main__":
    sys.exit(main())
