"""The quality of labelled data: facts for reports, and warnings about what makes answers or scores worse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from builder.store.seen import SeenTexts
from builder.tasks.examples import Example, hash_of
from builder.tasks.lookup import Texts
from builder.tasks.tasks import TrainingTask
from hplm.errors import some

FEW_DEV = 5  # dev texts
UNEVEN = 20  # times as many texts of one label as of another
NAMED = 3  # of many lines


def doubts(
    task: TrainingTask, labels: Sequence[str], given: Sequence[Example], training: Sequence[Example], dev: Sequence[Example],
    seen: SeenTexts,
) -> list[str]:  # fmt: skip
    """Returns warnings about examples. `given`: all of the training file. `seen`: also by this training."""
    said = repeated(task, given)
    counts = counts_of(training)
    of_texts = Counter(label for example in given for label in set(example.labels))
    if single := [label for label in labels if of_texts[label] == 1]:
        where = {label: _at(example) for example in given for label in example.labels}
        said.append(f"labels with a single text: {some([f'{label!r} ({where[label]})' for label in single], NAMED)}")
    if counts and max(counts.values()) >= UNEVEN * min(counts.values()):
        most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        said.append(f"labels are uneven: {most!r} {counts[most]:,} times, {least!r} {counts[least]:,}; look at macro_f1 too")
    if 0 < (paired := sum(example.pair is not None for example in training)) < len(training):
        said.append(f"{paired:,} of {len(training):,} texts have a text_pair, the others have none")
    if learned := [_at(example) for example in dev if hash_of(example) in seen.learned]:
        count = f"{len(learned):,} of {len(dev):,} dev texts"
        said.append(f"{count} were learned, now or before, so the score says little: {some(learned, NAMED)}")
    if len(dev) < FEW_DEV:
        said.append(f"dev texts: {len(dev)}, too few for a score that says anything")
    if counts and (absent := [label for label in labels if label not in counts]):
        said.append(f"the data have no examples of {some(absent, 10)}: the tenant forgets such labels; add earlier data")
    return said


def repeated(task: TrainingTask, examples: Sequence[Example]) -> list[str]:
    """Returns warnings about texts that occur again, with the same answer or another one."""
    first, same, other = dict[int, Example](), list[str](), list[str]()
    for example in examples:
        if (one := first.setdefault(hash_of(example), example)) is not example:
            (same if _right(task, one) == _right(task, example) else other).append(f"{_at(example)} (as line {one.line})")
    said = [f"{len(same):,} texts occur again: {some(same, NAMED)}"] if same else []
    if other and task.served.has_head:  # several texts may be near to one, or follow a prompt
        said.append(f"{len(other):,} texts occur again with another answer: {some(other, NAMED)}")
    return said


def described(examples: Sequence[Example]) -> dict[str, Any]:
    return {
        "texts": len(examples),
        "texts_with_pair": sum(example.pair is not None for example in examples),
        "label_counts": dict(sorted(counts_of(examples).items())),
    }


def looked_up(texts: Texts) -> dict[str, Any]:
    return {"texts_cut": texts.cut, "windows_found": texts.window_shares}


def cut(texts: Texts) -> list[str]:
    count = len(texts.examples)
    return [f"{texts.cut:,} of {count:,} texts are longer than the model takes and were cut"] if texts.cut else []


def counts_of(examples: Sequence[Example]) -> Counter[str]:
    return Counter(label for example in examples for label in example.labels)


def _at(example: Example) -> str:
    return f"{example.file.name}:{example.line}"


def _right(task: TrainingTask, example: Example) -> tuple[Any, ...]:
    labels = example.labels if task.one_label_a_row else tuple(sorted(example.labels))
    return labels, example.value, example.answers, example.negative, example.target
