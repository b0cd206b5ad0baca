"""Tokenises batches of documents, on several cores by processes. These import no more than this file does."""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

from builder.worker_processes import worker_processes
from hplm.model.tokenizer import Tokenizer

AHEAD = 2  # batches a process that are read before their turn

Batch = tuple[int, np.ndarray, np.ndarray]  # the number of its lines, the tokens of its documents end to end, their lengths


def tokenised(batches: Iterable[list[str]], tokenizer: Tokenizer, processes: int) -> Generator[Batch, None, None]:
    """Yields each batch in order, the same for any number of processes. One: none beside this."""
    if processes == 1:
        yield from (_encoded(tokenizer, batch) for batch in batches)
        return
    with NamedTemporaryFile() as packed, worker_processes(processes) as pool:
        pickle.dump(tokenizer, packed)
        packed.flush()
        begun = deque[Future[Batch]]()
        for batch in batches:
            begun.append(pool.submit(_encoded_there, packed.name, batch))
            if len(begun) == AHEAD * processes:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


def _encoded(tokenizer: Tokenizer, batch: list[str]) -> Batch:
    documents = tokenizer.encode_documents(batch)
    return len(batch), np.concatenate(documents).astype(np.uint32), np.array([*map(len, documents)])


def _encoded_there(packed: str, batch: list[str]) -> Batch:
    return _encoded(_unpacked(packed), batch)


@cache
def _unpacked(packed: str) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have processes of their own
    return pickle.loads(Path(packed).read_bytes())
