"""A tokenised corpus on disk, of any size.

tokens     uint32, all documents end to end; one that is longer than the model takes is several
ends       uint64, where each document ends
meta.json  how many of both, how many lines were read, and of which files; `begun.json` until all are
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from builder.console import progress_bar, say_costs
from builder.store.resumable import META, mapped, read_json, write_json
from builder.tables.text_files import check_file
from builder.tasks.examples import read_corpus
from hplm.clock import Clock
from hplm.errors import Broken, InvalidInput
from hplm.model.tokenizer import Tokenizer

FOLDER = "corpus"  # in the folder of a build
BATCH_DOCUMENTS = 1000
BATCH_CHARACTERS = 1 << 20  # the tokenizer's result takes far more memory than the text


class Corpus(Sequence[np.ndarray]):
    """Documents of token ids, int32."""

    def __init__(self, folder: Path) -> None:
        meta = read_json(folder / META, InvalidInput, "tokenise the corpus first")
        self.folder = folder
        self.tokens: int = meta["tokens"]
        self._tokens = mapped(folder / "tokens", np.uint32, (meta["tokens"],))
        self._ends = mapped(folder / "ends", np.uint64, (meta["documents"],))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, document: int) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride] nothing slices it
        if not -len(self) <= document < len(self):
            raise IndexError(document)
        document %= len(self)
        return np.array(self._tokens[self._start(document) : int(self._ends[document])], dtype=np.int32)

    def pieces(self, most_tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (tokens, lengths) of consecutive whole documents: at least one, and at most `most_tokens` tokens.

        Read, not mapped: mapped pages would stay with the process.
        """
        first = 0
        while first < len(self):
            start = self._start(first)
            last = max(first + 1, int(np.searchsorted(self._ends, np.uint64(start + most_tokens), side="right")))
            ends = self._ends[first:last].astype(np.int64)
            count = int(ends[-1]) - start
            tokens = np.fromfile(self.folder / "tokens", np.int32, count, offset=start * np.dtype(np.int32).itemsize)
            yield tokens, np.diff(ends, prepend=start)
            first = last

    def _start(self, document: int) -> int:
        return int(self._ends[document - 1]) if document else 0


def tokenize_corpus(paths: Sequence[Path], tokenizer: Tokenizer, folder: Path, clock: Clock = time) -> Corpus:
    """Tokenises files into a corpus. A call after an interruption continues after the last saved documents."""
    for path in paths:
        check_file(path)
    inputs = [[path.name, path.stat().st_size] for path in paths]
    begun, meta = folder / "begun.json", folder / META
    done = {"lines": 0, "documents": 0, "tokens": 0, "inputs": inputs}
    if (stored := next(filter(Path.exists, (meta, begun)), None)) is not None:
        done |= read_json(stored)
    if done["inputs"] != inputs:
        raise InvalidInput(f"{folder} holds the tokens of {done['inputs']}, not of {inputs}: give the same files, or remove it")
    if meta.exists():
        return Corpus(folder)
    size = sum(size for _, size in inputs)
    _say_costs(paths, size, tokenizer, folder.parent, clock)
    folder.mkdir(parents=True, exist_ok=True)
    bar = progress_bar(title="tokenising the corpus", total=size, unit="B", unit_scale=True)
    with bar, open(folder / "tokens", "ab") as tokens, open(folder / "ends", "ab") as ends:
        for file, whole in ((tokens, 4 * done["tokens"]), (ends, 8 * done["documents"])):
            if file.tell() < whole:
                raise Broken(f"{file.name} has {file.tell()} bytes of {whole}: remove {folder} to tokenise the corpus again")
            file.truncate(whole)
        for batch in _batches(islice(read_corpus(paths, bar.update), done["lines"], None)):
            documents = tokenizer.encode_documents(batch)
            until = np.cumsum([len(document) for document in documents]) + done["tokens"]
            np.concatenate(documents).astype(np.uint32).tofile(tokens)
            until.astype(np.uint64).tofile(ends)
            for file in (tokens, ends):
                file.flush()
                os.fsync(file.fileno())
            more = {"lines": done["lines"] + len(batch), "documents": done["documents"] + len(documents)}
            write_json(begun, done := {**done, **more, "tokens": int(until[-1])})
            bar.set_postfix_str(f"{done['tokens']:,} tokens", refresh=False)
    begun.rename(meta)
    return Corpus(folder)


def _say_costs(paths: Sequence[Path], size: int, tokenizer: Tokenizer, folder: Path, clock: Clock) -> None:
    """Says how long the corpus may take here, and its room, from the first texts."""
    texts, characters, read = [], 0, list[int]()
    for text in read_corpus(paths, read.append):
        texts.append(text)
        characters += len(text)
        if characters >= min(BATCH_CHARACTERS, size // 10):
            break
    started = clock.monotonic()
    tokens = sum(map(len, tokenizer.encode_documents(texts)))
    seconds, share = clock.monotonic() - started, sum(read) / size
    say_costs(f"tokenising {size / 1e6:,.1f} MB", seconds / share, f"{4 * tokens / share / 1e9:,.2f}", folder)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
