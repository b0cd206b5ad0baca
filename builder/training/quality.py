"""The quality of labelled data: facts for reports, and warnings about what makes answers or scores worse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from builder.tasks.examples import Example, hash_of
from builder.tasks.lookup import Texts
from builder.tasks.tasks import TrainingTask
from builder.training.data import Data
from hplm.errors import some

FEW_DEV = 5  # dev texts
UNEVEN = 20  # times as many texts of one label as of another
NAMED = 3  # of many lines


def described(texts: Texts) -> dict[str, Any]:
    return {
        "texts": len(texts.examples),
        "texts_cut": texts.cut,
        "texts_with_pair": sum(example.pair is not None for example in texts.examples),
        "label_counts": dict(sorted(Counter(label for example in texts.examples for label in example.labels).items())),
        "windows_found": texts.window_shares,
    }


def doubts(data: Data) -> list[str]:
    """Returns warnings about the data of a training."""
    training, dev, facts = data.train.examples, data.dev.examples, described(data.train)
    given = [*training, *(example for example in dev if example.file == training[0].file)]  # the whole training file
    said, counts, texts = repeated(data.task, [*training, *dev]), facts["label_counts"], facts["texts"]
    holding = Counter(label for example in given for label in set(example.labels))
    if single := {label: _at(example) for example in given for label in example.labels if holding[label] == 1}:
        said.append(f"labels with a single text: {some([f'{label!r} ({at})' for label, at in single.items()], NAMED)}")
    if counts and max(counts.values()) >= UNEVEN * min(counts.values()):
        most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        said.append(f"labels are uneven: {most!r} {counts[most]:,} times, {least!r} {counts[least]:,}; look at macro_f1 too")
    if cut := facts["texts_cut"]:
        said.append(f"{cut:,} of {texts:,} texts are longer than the model takes and were cut")
    if 0 < (paired := facts["texts_with_pair"]) < texts:
        said.append(f"{paired:,} of {texts:,} texts have a text_pair, the others have none")
    if learned := [_at(example) for example in dev if hash_of(example) in data.seen.learned]:
        count = f"{len(learned):,} of {len(dev):,} dev texts"
        said.append(f"{count} were learned, now or before, so the score says little: {some(learned, NAMED)}")
    if len(dev) < FEW_DEV:
        said.append(f"dev texts: {len(dev)}, too few for a score that says anything")
    if counts and (absent := [label for label in data.labels if label not in counts]):
        said.append(f"the data have no examples of {some(absent, 10)}: the tenant forgets such labels; add earlier data")
    return said


def repeated(task: TrainingTask, examples: Sequence[Example]) -> list[str]:
    """Returns warnings about texts that occur again: with the same answer in a file, or with another one."""
    first, same, other = dict[int, Example](), list[str](), list[str]()
    for example in examples:
        one = first.setdefault(hash_of(example), example)
        where = f"line {one.line}" if one.file == example.file else _at(one)
        if _right(task, one) != _right(task, example):
            other.append(f"{_at(example)} (as {where})")
        elif one.file == example.file and one.line != example.line:
            same.append(f"{_at(example)} (as {where})")
    said = [f"{len(same):,} texts occur again: {some(same, NAMED)}"] if same else []
    if other and task.served.has_head:  # several texts may be near to one, or follow a prompt
        said.append(f"{len(other):,} texts occur again with another answer: {some(other, NAMED)}")
    return said


def _at(example: Example) -> str:
    return f"{example.file.name}:{example.line}"


def _right(task: TrainingTask, example: Example) -> tuple[Any, ...]:
    labels = example.labels if task.one_label_a_row else tuple(sorted(example.labels))
    return labels, example.value, example.answers, example.negative, example.target
