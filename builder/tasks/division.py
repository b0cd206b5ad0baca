"""Divides a training file into training and dev part, so that no version is judged by a text that its weights have learned."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from builder.store.seen import SeenTexts
from builder.tasks.examples import Example, hash_of
from hplm.errors import InvalidInput

FEW_ALIKE = 10  # examples that share a text or passage go to dev together, if there are more such texts than this
Division = tuple[list[Example], list[Example]]  # the training and the dev part


def split_off(examples: Sequence[Example], share: float, seen: SeenTexts | None = None) -> Division:
    """Splits into training and dev part. Every label stays in training; no text is in both parts.

    `seen`: of the version whose weights are trained on. What they have learned stays in training. Its dev texts come to dev
    first, and then so many of the new ones as `share` says, those with the lowest hashes.
    """
    seen, by, groups = seen or SeenTexts(), shared_side(examples), defaultdict[int, list[int]](list)
    for number, example in enumerate(examples):
        groups[hash_of(example, by)].append(number)
    hashes = [hash_of(example) for example in examples]
    free = {key: own for key, own in groups.items() if seen.learned.isdisjoint((key, *(hashes[i] for i in own)))}
    is_dev = {key: not seen.dev.isdisjoint((key, *(hashes[i] for i in own))) for key, own in free.items()}
    known, new = (sum(len(own) for key, own in free.items() if is_dev[key] == side) for side in (True, False))
    largest = max(1, round(share * len(examples)))
    wanted = min(largest, known + max(1, round(share * new)))
    left = Counter(label for example in examples for label in set(example.labels))
    taken: set[int] = set()
    for key in sorted(free, key=lambda key: (not is_dev[key], key)):
        if len(taken) >= wanted:
            break
        own = Counter(label for number in free[key] for label in set(examples[number].labels))
        if len(free[key]) <= largest and all(left[label] > count for label, count in own.items()):
            taken.update(free[key])
            left.subtract(own)
    if not 0 < len(taken) < len(examples):
        if len(free) < len(groups):  # no new text can be set apart: learned ones are, and counted in the report
            return split_off(examples, share)
        raise InvalidInput(
            f"{examples[0].file}: no texts can be taken for dev, because they are too few, too alike, or each the only one of "
            "its label: add more, or give a --dev file"
        )
    training, dev = ([one for number, one in enumerate(examples) if (number in taken) == in_dev] for in_dev in (False, True))
    return training, dev


def split_again(examples: Sequence[Example], share: float, seen: SeenTexts) -> Division:
    """Splits the training file of a version as it was split for that version, which has seen these texts."""
    judged = seen.dev - seen.learned
    training, dev = ([one for one in examples if (hash_of(one) in judged) == in_dev] for in_dev in (False, True))
    return (training, dev) if dev else split_off(examples, share)


def seen_after(seen: SeenTexts, training: Sequence[Example], dev: Sequence[Example]) -> SeenTexts:
    """Returns what a version has seen that was trained on one that has seen these texts."""
    by = shared_side(training)
    learned, judged = (frozenset(hash_of(one, side) for one in part for side in ("both", by)) for part in (training, dev))
    return SeenTexts(seen.learned | learned, seen.dev | judged)


def shared_side(examples: Sequence[Example]) -> str:
    """Returns what many examples share: a text or one side of a pair. Split up, dev would ask what training has shown."""
    different = {side: len({getattr(example, side) for example in examples}) for side in ("text", "pair")}
    if any(example.answers for example in examples):  # for questions, the passage
        del different["text"]
    shared = [side for side, count in different.items() if FEW_ALIKE < count < len(examples)]
    return min(shared, key=different.__getitem__) if shared else "both"
