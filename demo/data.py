"""Writes the demo's data: a corpus for every domain, training, dev and test files for every tenant."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from builder.store.resumable import replaced
from demo.docstrings import read_definitions
from demo.documents import LONGEST, Asked, Docstring, is_seen, read_document, readable, shingles, split_documents
from demo.domains import DOMAINS, Domain
from demo.tasks import TASKS, Classified, DefinedNames, DemoTask, Example
from hplm.errors import HplmError

MANIFEST = "demo.json"
FORMAT = 3  # of the written files: raised when the same packages give other files

NOT_WORDS = re.compile(r"\W+")


@dataclass(frozen=True)
class DemoDomain:
    name: str
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
    tenants: tuple[DemoTenant, ...]  # in the order of their domains


def write_demo_data(
    folder: Path,
    domains: Sequence[Domain],
    tasks: Sequence[DemoTask],
    sizes: Mapping[str, int],
    show_progress: bool = True,
    further: bool = False,
) -> DemoData:
    """Writes the same files for the same installed packages, on any machine.

    `further`: the corpora also contain the rest of the packages, and related packages.
    """
    names = {domain.name: DefinedNames(domain.package_names) for domain in domains}
    documents, only_read = defaultdict[str, list[Docstring]](list), defaultdict[str, list[Docstring]](list)
    files: dict[tuple[str, Path], tuple[str, str, str]] = {}  # of each file of a domain: its first area, package and module
    for domain in domains:
        areas = {**domain.areas, "": domain.further if further else ()}  # files without an area are only in corpora
        for area, source in ((area, source) for area, sources in areas.items() for source in sources):
            for module, path in source.files():
                files.setdefault((domain.name, path), (area, source.package, module))
    for (domain, path), (area, package, module) in tqdm(
        files.items(), "reading docstrings", unit="file", disable=not show_progress
    ):
        for definition in read_definitions(package, module, path):
            if area:
                names[domain].add(definition)
            if definition.docstring:
                (documents if area else only_read)[domain].append(read_document(definition, area))

    splits = {domain.name: split_documents(documents[domain.name]) for domain in domains}
    examples = {task.tenant: _examples(task, splits[task.domain], names[task.domain]) for task in tasks}
    # The root reads the corpora of all domains, so none may contain a dev or test text of any domain.
    asked = Asked(one.text for own in (*splits.values(), *examples.values()) for split in ("dev", "test") for one in own[split])
    written, tenants = list[DemoDomain](), list[DemoTenant]()
    for domain in tqdm(domains, "writing demo data", unit="domain", disable=not show_progress):
        home = folder / domain.name
        corpus = readable(splits[domain.name]["train"] + only_read[domain.name], asked)
        write_lines(home / "corpus.txt", (" ".join(document.text.split()[:LONGEST]) for document in corpus))
        written.append(DemoDomain(domain.name, home / "corpus.txt", len(corpus)))
        for task in (task for task in tasks if task.domain == domain.name):
            chosen = {split: _sample(examples[task.tenant][split], size) for split, size in sizes.items()}
            if missing := [split for split, own in chosen.items() if not own]:
                raise HplmError(
                    f"demo tenant '{task.tenant}': the sources of {', '.join(domain.packages)} contain no {missing[0]} "
                    "examples: install these packages, and this Python, with their .py files"
                )
            tenants.append(write_tenant(home, task.tenant, task.domain, task.task, task.question, chosen))
    return DemoData(tuple(written), tuple(tenants))


def write_tenant(
    home: Path, id: str, domain: str, task: str, question: str, examples: Mapping[str, Sequence[Example]], ascii: bool = False
) -> DemoTenant:
    """Writes a tenant's files. `ascii`: other letters are escaped."""
    files = {split: home / f"{id}.{split}.jsonl" for split in examples}
    for split, own in examples.items():
        write_lines(files[split], (json.dumps(asdict(example), ensure_ascii=ascii) for example in own))
    known, tested = (Counter(label for one in examples[split] for label in one.labels) for split in ("train", "test"))
    majority = max(tested.values(), default=0) / max(1, tested.total())
    return DemoTenant(id, domain, task, question, tuple(sorted(known)), **files, majority_share=majority)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def stored_demo_data(folder: Path, sizes: Mapping[str, int], further: bool = False) -> DemoData:
    """Returns the data in a folder. Writes them if they are missing, or were written with other settings."""
    written_as = {"sizes": dict(sizes), "further": further, "format": FORMAT}
    return stored(folder, written_as, lambda: write_demo_data(folder, DOMAINS, TASKS, sizes, further=further))


def stored(folder: Path, written_as: Mapping[str, Any], write: Callable[[], DemoData]) -> DemoData:
    """Returns the data that an earlier run has written into a folder with these settings, or writes them."""
    manifest = folder / MANIFEST
    if not manifest.exists() or json.loads(manifest.read_bytes()).get("written_as") != written_as:
        described = {"written_as": written_as, **vars(write())}
        content = msgspec.json.encode(described, enc_hook=lambda path: str(path.relative_to(folder)))
        with replaced(manifest) as temporary:
            temporary.write_bytes(msgspec.json.format(content, indent=1))
    return data_of(folder)


def data_of(folder: Path) -> DemoData:
    """Returns the data that an earlier run has written. The folder may have been moved since."""
    return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=DemoData, dec_hook=lambda _, name: folder / name)


def _examples(task: DemoTask, splits: Mapping[str, list[Docstring]], names: DefinedNames) -> dict[str, list[Example]]:
    """Returns the examples of each split. No text is there twice, and none that shares half with an earlier split."""
    texts: set[str] = set()
    earlier: set[str] = set()
    found: dict[str, list[Example]] = {}
    for split, documents in splits.items():
        answered = {}
        for example in filter(None, (task.example(document, names) for document in documents)):
            answered.setdefault(NOT_WORDS.sub(" ", example.text).strip().lower(), example)
        fresh = [(example, shingles(example.text)) for words, example in answered.items() if words not in texts]
        found[split] = [example for example, held in fresh if not is_seen(held, earlier)]
        texts.update(answered)
        earlier.update(*(held for _, held in fresh))
    return found


def _sample(examples: Sequence[Example], size: int) -> list[Example]:
    """Returns at most `size` examples in a fixed random order. Rare labels of a classification are chosen first."""
    by_label: dict[str, list[Example]] = defaultdict(list)
    for example in sorted(examples, key=lambda one: shuffled(repr(one))):
        by_label[example.label if isinstance(example, Classified) else ""].append(example)
    chosen: list[Example] = []
    for left, members in zip(range(len(by_label), 0, -1), sorted(by_label.values(), key=len), strict=True):
        chosen += members[: (size - len(chosen)) // left]
    return sorted(chosen, key=lambda one: shuffled(repr(one)))


def shuffled(text: str) -> bytes:
    """Returns the key of a fixed random order."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
