"""Writes the demo's data: a corpus for every domain, training, dev and test files for every tenant."""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from builder.store.resumable import replaced
from demo.docstrings import read_definitions
from demo.documents import LONGEST, Asked, Document, is_seen, read_document, readable, shingles, split_documents
from demo.domains import DOMAINS, Domain
from demo.tasks import TASKS, Classified, DemoTask, Example, Names
from hplm.errors import HplmError

SIZES = {"train": 2000, "dev": 300, "test": 500}
MANIFEST = "demo.json"
FORMAT = 2  # of the written files: raised when the same packages give other texts

NOT_WORDS = re.compile(r"\W+")


@dataclass(frozen=True)
class DemoDomain:
    name: str
    packages: tuple[str, ...]
    corpus: Path  # text, one document a line; no dev or test file of any domain has a similar text
    documents: int


@dataclass(frozen=True)
class DemoTenant:
    id: str
    domain: str
    task: str
    question: str
    labels: tuple[str, ...]
    train: Path
    dev: Path
    test: Path
    majority_share: float  # the score on test of always answering the most frequent label (of a word, for `tag`)


@dataclass(frozen=True)
class DemoData:
    domains: tuple[DemoDomain, ...]
    tenants: tuple[DemoTenant, ...]


def write_demo_data(
    folder: Path,
    domains: Sequence[Domain] = DOMAINS,
    tasks: Sequence[DemoTask] = TASKS,
    sizes: Mapping[str, int] = SIZES,
    show_progress: bool = True,
    further: bool = False,
) -> DemoData:
    """Writes the same files for the same installed packages, on any machine.

    `further`: the corpora also contain the rest of the packages, and related packages.
    """
    names = {domain.name: Names(domain.package_names) for domain in domains}
    documents: dict[str, list[Document]] = defaultdict(list)
    beside: dict[str, list[Document]] = defaultdict(list)
    with _no_cycle_collection():
        for place, area, path in tqdm(_files(domains), "reading docstrings", unit="file", disable=not show_progress):
            for definition in read_definitions(place.package, place.module, path):
                names[place.domain].add(definition)
                if definition.docstring:
                    documents[place.domain].append(read_document(definition, area))
        others = _further_files(domains) if further else []
        for place, path in tqdm(others, "reading further docstrings", unit="file", disable=not (show_progress and others)):
            for definition in read_definitions(place.package, place.module, path):
                if definition.docstring:
                    beside[place.domain].append(read_document(definition, place.package))

    splits = {domain.name: split_documents(documents[domain.name]) for domain in domains}
    examples = {task.tenant: _examples(task, splits[task.domain], names[task.domain]) for task in tasks}
    asked = _asked(splits, examples)
    written: list[DemoDomain] = []
    tenants: list[DemoTenant] = []
    for domain in tqdm(domains, "writing demo data", unit="domain", disable=not show_progress):
        home = folder / domain.name
        home.mkdir(parents=True, exist_ok=True)
        read = readable(splits[domain.name]["train"] + beside[domain.name], asked)
        written.append(_write_corpus(home, domain, read))
        own_tasks = [task for task in tasks if task.domain == domain.name]
        tenants += [_write_tenant(home, task, examples[task.tenant], names[domain.name], sizes) for task in own_tasks]
    return DemoData(tuple(written), tuple(tenants))


def stored_demo_data(folder: Path, sizes: Mapping[str, int], further: bool = False) -> DemoData:
    """Returns the data in a folder. Writes them if they are missing, or were written with other settings."""
    written_as, manifest = {"sizes": dict(sizes), "further": further, "format": FORMAT}, folder / MANIFEST
    if not manifest.exists() or json.loads(manifest.read_text("utf-8")).get("written_as") != written_as:
        data = write_demo_data(folder, sizes=sizes, further=further)
        with replaced(manifest) as temporary:
            temporary.write_text(json.dumps({"written_as": written_as, **asdict(data)}, default=str, indent=1), "utf-8")
    return data_of(folder)


def data_of(folder: Path) -> DemoData:
    """Returns the data that an earlier run has written."""
    stored = json.loads((folder / MANIFEST).read_text("utf-8"))

    def here(domain: str, file: str) -> Path:
        """The folder may have been moved since."""
        return folder / domain / Path(file).name

    domains = (
        DemoDomain(**{**d, "packages": tuple(d["packages"]), "corpus": here(d["name"], d["corpus"])}) for d in stored["domains"]
    )
    tenants = (
        DemoTenant(**{**t, "labels": tuple(t["labels"]), **{split: here(t["domain"], t[split]) for split in SIZES}})
        for t in stored["tenants"]
    )
    return DemoData(tuple(domains), tuple(tenants))


@contextmanager
def _no_cycle_collection() -> Iterator[None]:
    """Stops Python's search for cycles. Syntax trees contain none, and the search takes a quarter of the reading time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Place(NamedTuple):
    domain: str
    package: str
    module: str


def _files(domains: Sequence[Domain]) -> list[tuple[Place, str, Path]]:
    """Returns each file of a domain once, with the first area that lists it."""
    found: dict[Place, tuple[str, Path]] = {}
    for domain in domains:
        for area in domain.areas:
            for source in area.sources:
                for module, path in source.files():
                    found.setdefault(Place(domain.name, source.package, module), (area.name, path))
    return [(place, area, path) for place, (area, path) in found.items()]


def _further_files(domains: Sequence[Domain]) -> list[tuple[Place, Path]]:
    """Returns the further files that no area lists."""
    known = {(place.domain, path) for place, _, path in _files(domains)}
    return [
        (Place(domain.name, source.package, module), path)
        for domain in domains
        for source in domain.further
        for module, path in source.files()
        if (domain.name, path) not in known
    ]


def _write_corpus(home: Path, domain: Domain, documents: Sequence[Document]) -> DemoDomain:
    corpus = home / "corpus.txt"
    lines = (" ".join(document.text.split()[:LONGEST]) + "\n" for document in documents)
    corpus.write_text("".join(lines), encoding="utf-8")
    return DemoDomain(domain.name, domain.packages, corpus, len(documents))


def _examples(task: DemoTask, splits: Mapping[str, list[Document]], names: Names) -> dict[str, list[Example]]:
    """Returns the examples of each split. No text is there twice, and none that shares half with an earlier split."""
    texts: set[str] = set()
    earlier: set[str] = set()
    found: dict[str, list[Example]] = {}
    for split, documents in splits.items():
        answered = _unseen((example for document in documents if (example := task.example(document, names))), texts)
        found[split] = [example for example in answered if not is_seen(shingles(example.text), earlier)]
        earlier.update(*(shingles(example.text) for example in answered))
    return found


def _asked(splits: Mapping[str, Mapping[str, list[Document]]], examples: Mapping[str, Mapping[str, list[Example]]]) -> Asked:
    """Returns the dev and test texts. No corpus of any domain may contain them, because the root reads all corpora."""
    of_documents = (one.text for own in splits.values() for split in ("dev", "test") for one in own[split])
    of_examples = (one.text for own in examples.values() for split in ("dev", "test") for one in own[split])
    return Asked(chain(of_documents, of_examples))


def _write_tenant(
    home: Path, task: DemoTask, examples: Mapping[str, list[Example]], names: Names, sizes: Mapping[str, int]
) -> DemoTenant:
    files: dict[str, Path] = {}
    counts: dict[str, Counter[str]] = {}
    for split, size in sizes.items():
        chosen = _sample(examples[split], size)
        if not chosen:
            raise HplmError(
                f"demo tenant '{task.tenant}': the sources of {', '.join(sorted(names.packages))} contain no {split} "
                "examples: install these packages, and this Python, with their .py files"
            )
        files[split] = home / f"{task.tenant}.{split}.jsonl"
        lines = (json.dumps(asdict(example), ensure_ascii=False) + "\n" for example in chosen)
        files[split].write_text("".join(lines), encoding="utf-8")
        counts[split] = Counter(label for example in chosen for label in example.labels)
    labels = tuple(sorted(counts["train"]))
    majority = max(counts["test"].values()) / counts["test"].total()
    return DemoTenant(task.tenant, task.domain, task.task, task.question, labels, **files, majority_share=majority)


def _unseen(examples: Iterable[Example], seen: set[str]) -> list[Example]:
    """Returns the examples without repeated texts, and adds their texts to `seen`. Case and punctuation do not matter."""
    kept = []
    for example in examples:
        words = NOT_WORDS.sub(" ", example.text).strip().lower()
        if words not in seen:
            seen.add(words)
            kept.append(example)
    return kept


def _sample(examples: Sequence[Example], size: int) -> list[Example]:
    """Returns at most `size` examples in a fixed random order. Rare labels of a classification are chosen first."""
    by_label: dict[str, list[Example]] = defaultdict(list)
    for example in sorted(examples, key=_shuffled):
        by_label[example.label if isinstance(example, Classified) else ""].append(example)
    chosen: list[Example] = []
    for left, members in zip(range(len(by_label), 0, -1), sorted(by_label.values(), key=len), strict=True):
        chosen += members[: (size - len(chosen)) // left]
    return sorted(chosen, key=_shuffled)


def _shuffled(example: Example) -> bytes:
    return hashlib.blake2b(repr(example).encode(), digest_size=8).digest()
