"""Labelled texts as the upper stack reads them: by the road that serving takes, from the tables of the tenant's chain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from builder.data import Example, Labelled
from builder.packs import positions_of
from builder.store import Store
from hplm.errors import Broken, InvalidInput
from hplm.model.tokenizer import Encoded, first_tokens, words_of
from hplm.plot.gathering import Gatherer

UNREAD = -1  # of a row whose word has no token: never learned from, always counted as wrong


@dataclass(frozen=True)
class Text:
    """One labelled text, looked up."""

    addresses: np.ndarray  # one a token
    segments: np.ndarray
    reading: np.ndarray  # for each answer row the token to read, or UNREAD
    targets: np.ndarray  # for each answer row the number of its label


@dataclass(frozen=True)
class Texts:
    texts: list[Text]
    lengths: np.ndarray
    cut: int  # texts longer than the model takes: what is beyond is not seen
    found: list[float]  # share of windows by how often they had to shrink: whole ones first


@dataclass(frozen=True)
class Pack:
    """Some of the texts end to end, on the device."""

    sums: Tensor
    positions: Tensor
    segments: Tensor
    lengths: list[int]
    reading: Tensor
    targets: Tensor  # UNREAD where there is nothing to read


class Reader:
    """Reads for one domain's chain."""

    def __init__(self, store: Store, domain: str, version: int) -> None:
        self._tokenizer = store.tokenizer()
        self._forest = store.forest()
        self._chain = self._forest.chain(domain, version)
        self._gatherer = Gatherer(torch.device("cpu"), torch.float32)

    def read(self, labelled: Labelled, task: str, labels: Sequence[str], show_progress: bool) -> Texts:
        number_of = {label: number for number, label in enumerate(labels)}
        texts, levels, cut = [], np.zeros(len(self._chain.space.masks), dtype=np.int64), 0
        bar = tqdm(labelled.examples, desc=f"looking up {labelled.path.name}", unit="text", disable=not show_progress)
        for example in bar:
            targets = np.array([number_of[label] for label in example.labels], dtype=np.int64)
            encoded, shortened = self._encode(example, f"{labelled.path}:{example.line}")
            hits = self._chain.lookup(encoded.tokens, np.array([len(encoded.tokens)]))
            levels += np.bincount(hits.levels, minlength=len(levels))
            cut += shortened
            texts.append(Text(hits.addresses, encoded.segments, _reading(task, example.text, encoded), targets))
        lengths = np.array([len(text.addresses) for text in texts], dtype=np.int64)
        return Texts(texts, lengths, cut, [round(share, 4) for share in (levels / levels.sum()).tolist()])

    def pack(self, texts: Texts, chosen: np.ndarray, device: torch.device) -> Pack:
        members = [texts.texts[i] for i in chosen]
        lengths = texts.lengths[chosen]
        reading = [text.reading for text in members]
        starts = np.repeat(np.cumsum(lengths) - lengths, [len(rows) for rows in reading])
        rows = np.concatenate(reading)
        targets = np.where(rows == UNREAD, UNREAD, np.concatenate([text.targets for text in members]))
        addresses = np.concatenate([text.addresses for text in members])
        if len(self._gatherer.broken(self._forest, addresses)):
            raise Broken("a table is corrupt: `hplm verify --store` says which")

        def index(numbers: np.ndarray) -> Tensor:
            return torch.from_numpy(numbers.astype(np.int64)).to(device)

        return Pack(
            sums=self._gatherer.sums(self._forest, addresses, lengths).to(device),
            positions=index(positions_of(lengths)),
            segments=index(np.concatenate([text.segments for text in members])),
            lengths=lengths.tolist(),
            reading=index(np.maximum(rows, 0) + starts),
            targets=index(targets),
        )

    def _encode(self, example: Example, where: str) -> tuple[Encoded, bool]:
        try:
            encoded = self._tokenizer.encode(example.text, example.pair, truncate=True)
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None
        if len(encoded.tokens) < self._tokenizer.positions:
            return encoded, False
        try:
            self._tokenizer.encode(example.text, example.pair)
        except InvalidInput:
            return encoded, True
        return encoded, False


def _reading(task: str, text: str, encoded: Encoded) -> np.ndarray:
    """The token that each answer row reads: the first of the text for `classify`, a word's first for `tag`."""
    if task == "classify":
        return np.zeros(1, dtype=np.int64)
    return first_tokens(encoded, words_of(text)).astype(np.int64)


def labels_of(labelled: Labelled) -> list[str]:
    labels = sorted({label for example in labelled.examples for label in example.labels})
    if len(labels) == 1:
        raise InvalidInput(f"{labelled.path}: every label is {labels[0]!r}: there is nothing to tell apart")
    return labels


def check_labels(labelled: Labelled, labels: Sequence[str], source: str) -> None:
    """Every label must be one that training has seen."""
    known = set(labels)
    for example in labelled.examples:
        for label in example.labels:
            if label not in known:
                raise InvalidInput(
                    f"{labelled.path}:{example.line}: label {label!r} does not occur in {source}: "
                    f"correct it, or train with examples of it (known: {_listed(labels)})"
                )


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels[:10]) + (f", ... {len(labels)} in all" if len(labels) > 10 else "")


def split_off(labelled: Labelled, share: float, seed: int) -> tuple[Labelled, Labelled]:
    """Training and dev part by chance; no label is left without an example to learn it from."""
    order = np.random.default_rng(seed).permutation(len(labelled.examples))
    wanted = max(1, round(share * len(order)))
    left = Counter(label for example in labelled.examples for label in set(example.labels))
    taken: set[int] = set()
    for number in order:
        own = set(labelled.examples[number].labels)
        if len(taken) < wanted and all(left[label] > 1 for label in own):
            taken.add(int(number))
            left.subtract(own)
    if not taken:
        raise InvalidInput(f"{labelled.path}: too few examples to set some aside for dev: add more, or give a --dev file")
    parts: tuple[list[Example], list[Example]] = ([], [])
    for number, example in enumerate(labelled.examples):
        parts[number in taken].append(example)
    return Labelled(labelled.path, parts[0]), Labelled(labelled.path, parts[1])
