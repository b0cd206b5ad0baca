"""Looks labelled texts up in the tables of a tenant's chain, by the same code as serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from builder.console import progress_bar
from builder.packed_batches import positions_of
from builder.store.store import Store
from builder.tasks.examples import Example
from builder.tasks.tasks import TrainingTask
from hplm.errors import Broken, InvalidInput
from hplm.lookup.lookup import check_length
from hplm.model.tensors import sent
from hplm.model.tokenizer import Encoded
from hplm.plot.computed import ComputedRows
from hplm.plot.gathering import Gatherer
from hplm.tasks.tasks import windows_of

KEPT_BYTES = 1 << 30  # of rows that were computed


@dataclass(frozen=True)
class Text:
    """One labelled text, looked up, or a window of it, or one of the texts whose vectors are compared."""

    example: Example
    window: int  # its number in the example
    tokens: np.ndarray
    addresses: np.ndarray  # one a token; the null row's of windows that are to be computed
    segments: np.ndarray
    spans: np.ndarray  # answer rows x 3: the token to read, or UNREAD, and the code points it speaks of
    targets: np.ndarray  # in the form that the task's loss takes


class LookedUp(NamedTuple):
    """Holds what a look-up reads of a text, as `Encoded` does."""

    tokens: np.ndarray
    lengths: np.ndarray  # of its windows
    segments: np.ndarray


@dataclass(frozen=True)
class Texts:
    texts: list[Text]  # those of an example side by side
    cut: int  # texts longer than the model takes, whose end is dropped
    window_shares: list[float]  # by how often they were shortened, whole ones first; those to be computed are left out

    @cached_property
    def examples(self) -> list[Example]:
        return [text.example for text in self.texts if text.window == 0]

    @cached_property
    def starts(self) -> np.ndarray:
        """The number of each example's first text."""
        return np.array([number for number, text in enumerate(self.texts) if text.window == 0], dtype=np.int64)

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array([len(text.addresses) for text in self.texts], dtype=np.int64)

    def first(self, count: int) -> Texts:
        return replace(self, texts=self.texts[:count])


@dataclass(frozen=True)
class Pack:
    """Some texts packed end to end, on the device."""

    sums: Callable[[], Tensor]  # of the tables' rows, gathered when first asked for
    tokens: Tensor
    positions: Tensor
    segments: Tensor
    lengths: list[int]
    reading: Tensor
    rows_of: list[int]  # the number of rows of each text
    targets: Tensor


def windows_found(shares: Sequence[float]) -> str:
    """`shares`: those of `Texts`, or of their report."""
    shortened = "".join(f", after {number} shortenings {share:.1%}" for number, share in enumerate(shares[1:], 1))
    return f"windows found: whole {shares[0]:.1%}{shortened}"


class Reader:
    """Looks texts up in one domain's chain."""

    def __init__(self, store: Store, domain: str, version: int) -> None:
        self.store, self.branch = store, (domain, version)
        self._tokenizer = store.tokenizer()
        self._forest = store.forest(domain, version)
        self._chain = self._forest.chain(domain, version)
        self._gatherer = Gatherer(torch.device("cpu"), torch.float32)
        self._computes = store.config.is_decoder and store.has_lower(domain, version)
        self._computed: ComputedRows | None = None  # None: none yet

    def __reduce__(self) -> tuple[Any, ...]:
        """Opens the same tables where it is sent."""
        return Reader, (self.store, *self.branch)

    def read(self, examples: Sequence[Example], task: TrainingTask, labels: Sequence[str]) -> Texts:
        number_of = {label: number for number, label in enumerate(labels)}
        texts, levels, cut = [], np.zeros(len(self._chain.space.masks), dtype=np.int64), 0
        for example in progress_bar(examples, f"looking up {examples[0].file.name}", unit="text"):
            for part, (text, pair) in enumerate(task.texts_of(example)):
                encoded, spans, shortened = self._encode(task, replace(example, text=text, pair=pair))
                hits = self._chain.lookup(encoded.tokens, encoded.lengths)
                addresses = hits.whole if self._computes else hits.addresses
                levels += np.bincount(hits.levels, minlength=len(levels))
                cut += shortened
                windows = windows_of(spans, len(encoded.tokens)) if task.served.needs_pair else [(slice(None), spans)]
                for number, (at, own) in enumerate(windows, part):
                    targets = task.targets(example, own, number_of)
                    targets = targets[part : part + 1] if task.embedding is not None else targets
                    texts.append(Text(example, number, encoded.tokens[at], addresses[at], encoded.segments[at], own, targets))
        shares = (levels / levels.sum())[: 1 if self._computes else None]
        return Texts(texts, cut, [round(share, 4) for share in shares.tolist()])

    def with_tokens(self, text: Text, tokens: np.ndarray) -> Text:
        """Returns a text with other tokens in the places of its own."""
        hits = self._chain.lookup(tokens, np.array([len(tokens)]))
        return replace(text, tokens=tokens, addresses=hits.whole if self._computes else hits.addresses)

    def pack(self, texts: Texts, chosen: np.ndarray, device: torch.device) -> Pack:
        members, lengths = [texts.texts[i] for i in chosen], texts.lengths[chosen]
        rows_of = [len(text.spans) for text in members]
        starts = np.repeat(np.cumsum(lengths) - lengths, rows_of)
        rows = np.concatenate([text.spans[:, 0] for text in members])

        def index(numbers: np.ndarray) -> Tensor:
            return sent(numbers.astype(np.int64), device)

        return Pack(
            sums=cache(lambda: self._sums(members, lengths, device)),
            tokens=index(np.concatenate([text.tokens for text in members])),
            positions=index(positions_of(lengths)),
            segments=index(np.concatenate([text.segments for text in members])),
            lengths=lengths.tolist(),
            reading=index(np.maximum(rows, 0) + starts),
            rows_of=rows_of,
            targets=sent(np.concatenate([text.targets for text in members]), device),
        )

    def _sums(self, texts: Sequence[Text], lengths: np.ndarray, device: torch.device) -> Tensor:
        addresses = np.concatenate([text.addresses for text in texts])
        if len(self._gatherer.broken(self._forest, addresses)):
            raise Broken("a table is corrupt: `hplm verify --store` names it")
        sums = sent(self._gatherer.sums(self._forest, addresses, lengths), device)
        if self._computes:
            if self._computed is None:
                lower = self.store.lower(*self.branch).to(device).eval()
                self._computed = ComputedRows(self.store.config, device, sums.dtype, lambda _: lower, KEPT_BYTES)
            keys = self._chain.space.of(np.concatenate([text.tokens for text in texts]), lengths)
            self._computed.fill(sums, addresses, keys, [(self._chain.domain, len(addresses))])
        return sums

    def _encode(self, task: TrainingTask, example: Example) -> tuple[Encoded | LookedUp, np.ndarray, bool]:
        """Returns the tokens, the answer rows, and whether a part was dropped."""
        limit = task.embedding.limit if task.embedding is not None else None
        encode = partial(self._tokenizer.encode, example.text, example.pair, in_windows=task.served.needs_pair, limit=limit)
        try:
            check_length(example.text, example.pair)
            encoded = encode(truncate=True)
            spans = task.served.rows(example.text, example.pair, encoded)
        except InvalidInput as error:
            raise InvalidInput(f"{example.where}: {error}") from None
        try:
            if len(encoded.tokens) >= (limit or self._tokenizer.positions):
                encode()
        except InvalidInput:
            return encoded, spans, True
        return encoded, spans, False


class NoTables(Reader):
    """Looks nothing up."""

    def __init__(self) -> None:
        pass

    def read(self, examples: Sequence[Example], task: TrainingTask, labels: Sequence[str]) -> Texts:
        nothing = np.empty(0, np.int64)
        return Texts([Text(example, 0, *[nothing] * 5) for example in examples], 0, [])
