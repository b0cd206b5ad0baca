"""Counts of the n-grams of some files, made on any machine: a build on another one adds them instead of counting.

of.json   the tokenizer, which files of the whole (`part`), and the files
counts/   their counts
corpus/   their tokens, until they are counted
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from builder.part import Part
from builder.store.branches import Branches
from builder.store.resumable import read_json, write_json
from builder.tables.corpus import FOLDER, tokenize_corpus
from builder.tables.counts import Counts, count_ngrams
from hplm.errors import InvalidInput
from hplm.model.tokenizer import Tokenizer
from hplm.plot.keys import KeySpace

OF = "of.json"
COUNTS = "counts"


@dataclass(frozen=True)
class NgramSettings:
    """How texts become n-grams."""

    tokenizer_json: str
    positions: int
    start_id: int | None
    space: KeySpace

    @classmethod
    def of(cls, store: Branches) -> NgramSettings:
        return cls(
            (store.folder / "tokenizer.json").read_text("utf-8"), store.config.positions, store.config.start_id, store.space
        )

    @property
    def digest(self) -> str:
        return sha256(self.tokenizer_json.encode()).hexdigest()[:12]


def count_part(files: Sequence[Path], part: Part, reading: NgramSettings, folder: Path) -> Counts:
    """Counts a part of the files, the largest first. A call after an interruption goes on."""
    if len(files) < part.of:
        raise InvalidInput(f"--part {part} of {len(files)} files: give at least as many files as parts, or split a large one")
    files = part.among(sorted(files, key=lambda file: (-file.stat().st_size, file.name)))
    inputs = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    of = {"tokenizer": reading.digest, "part": [part.number, part.of], "files": inputs}
    if not (folder / OF).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / OF, of)
    elif read_json(folder / OF) != of:
        raise InvalidInput(f"{folder} holds counts of other files, or of another tokenizer: name another --to, or remove it")
    counts = folder / COUNTS
    if not (counts / "meta.json").exists():
        tokenizer = Tokenizer(reading.tokenizer_json, reading.positions, reading.start_id)
        count_ngrams(tokenize_corpus(files, tokenizer, folder / FOLDER), reading.space, counts)
    if (folder / FOLDER).exists():
        shutil.rmtree(folder / FOLDER)
    return Counts(counts)


def read_parts(folders: Sequence[Path], reading: NgramSettings) -> list[Counts]:
    """Returns the counts of all parts. Refuses those of another tokenizer or window, and some parts of a whole."""
    counted, given = list[Counts](), set[tuple[int, int]]()
    for folder in folders:
        of = read_json(folder / OF, InvalidInput, "make it with `hplm build counts`")
        counted.append(Counts(folder / COUNTS))
        if (of["tokenizer"], counted[-1].space) != (reading.digest, reading.space):
            raise InvalidInput(f"{folder} has counts of another tokenizer or window: count these files again for this store")
        given.add(tuple(of["part"]))
    for parts in {parts for _, parts in given}:
        if missing := [str(number) for number in range(1, parts + 1) if (number, parts) not in given]:
            raise InvalidInput(f"--counts lacks the parts {', '.join(missing)} of {parts}: give all folders of a corpus")
    return counted
