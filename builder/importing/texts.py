"""Texts without labels, from which tenants learn to answer like their checkpoints, and the checkpoints' states of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch
from torch import Tensor

from builder.importing.options import FEWEST
from builder.learning.loop import half_precision
from builder.tables.text_files import digest_of_files
from builder.tasks.examples import Example, hash_of, read_unlabelled
from builder.tasks.lookup import Pack, Reader, Texts
from builder.tasks.tasks import TrainingTask
from builder.training.data import Data
from hplm.errors import InvalidInput
from hplm.lookup.lookup import LONGEST_TEXT
from hplm.model.tensors import sent

MOST_READ = 100_000  # different texts of a file
HELD_OUT, FEWEST_HELD_OUT, MOST_HELD_OUT = 0.15, 50, 500  # the share of the texts that only judges, and its bounds
# An import learns from at most so many tokens, or from A_TEXT for each text of --most-texts if these are more: a long document
# takes as long as many short ones.
LEAST_ROOM, A_TEXT = 250_000, 84
MOST_BYTES = 4 << 30  # 250,000 tokens take 3.1 GB after eight layers as wide as BERT-base, 0.8 after four of MiniLM
States = Callable[[Pack], Sequence[Tensor]]  # of all tokens, after each upper layer


@dataclass(frozen=True)
class UnlabelledTexts:
    """Files of texts, which are read once for many checkpoints."""

    paths: Sequence[Path]
    are_documents: bool = False  # of a corpus: they may be longer than a text

    def __str__(self) -> str:
        return " and ".join(map(str, self.paths))

    @cached_property
    def digest(self) -> str:
        return digest_of_files(*self.paths)

    @cached_property
    def examples(self) -> list[Example]:
        """The first texts, each once."""
        found: dict[int, Example] = {}
        for example in chain.from_iterable(map(read_unlabelled, self.paths)):
            text = replace(example, text=example.text[:LONGEST_TEXT]) if self.are_documents else example
            found.setdefault(hash_of(text), text)
            if len(found) == MOST_READ:
                break
        if len(found) < FEWEST:
            raise InvalidInput(f"{self} has {len(found)} different texts: to learn from them needs {FEWEST} or more")
        return list(found.values())

    def divided(self, reader: Reader, task: TrainingTask, labels: list[str], most: int, seed: int) -> tuple[Texts, Texts]:
        """Returns the texts to learn from, and those that only judge. `most`: of both."""
        order = np.random.default_rng(seed).permutation(len(self.examples))[:most].tolist()
        most_tokens = max(LEAST_ROOM, A_TEXT * most)
        held_out = min(MOST_HELD_OUT, max(FEWEST_HELD_OUT, round(HELD_OUT * len(order))), len(order) // 2)
        learned, judged = (
            _first(reader.read([self.examples[i] for i in part], task, labels), share * most_tokens)
            for part, share in ((order[held_out:], 1.0), (order[:held_out], HELD_OUT))
        )
        return learned, judged


def _first(texts: Texts, tokens: float) -> Texts:
    """Returns the first texts with at most so many tokens."""
    count = max(1, int(np.searchsorted(np.cumsum(texts.lengths), tokens, side="right")))
    while count < len(texts.texts) and texts.texts[count].window:  # the windows of a text stay together
        count += 1
    return texts.first(count)


def taught(states: States, data: Data, folder: Path, most: int = MOST_BYTES) -> Callable[[np.ndarray, Pack], Sequence[Tensor]]:
    """Returns a function from a batch, the numbers of its texts and their pack, to its states.

    They are kept in 16 bits, in a file without a name: it ends with the process. If it would take more than `most` bytes or
    half of the free disk, the states are computed again for each batch.
    """
    tokens, width = int(data.train.lengths.sum()), data.config.upper_layers * data.config.hidden
    if (size := 2 * tokens * width) > min(most, shutil.disk_usage(folder).free // 2):
        return lambda _, pack: states(pack)
    with TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # without it, a full disk would end the process in a later write
        room = np.asarray(np.memmap(file, np.float16, "r+", shape=(tokens, width)))
    kept = np.split(room, np.cumsum(data.train.lengths)[:-1])
    for chosen, pack in data.packs(data.train, title="asking the checkpoint"):
        with torch.no_grad(), half_precision(data.device):
            found = torch.cat(list(states(pack)), dim=1).half().cpu()
        for i, own in zip(chosen, found.split(pack.lengths), strict=True):
            kept[i][:] = own.numpy()

    def read(chosen: np.ndarray, _: Pack) -> Sequence[Tensor]:
        return sent(np.concatenate([kept[i] for i in chosen]), data.device).float().split(data.config.hidden, dim=1)

    return read
