"""Lower layers learn from packed documents, windows that are shortened as in a lookup, and the teacher's output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor, nn

from builder.learning.bodies import WholeBody, attention_of
from builder.packed_batches import packed_batches, positions_of
from builder.tables.sorted_runs import distinct
from hplm.model.config import BackboneConfig
from hplm.model.stacks import LowerStack, UpperStack, through, turn_of
from hplm.model.tensors import sent
from hplm.plot.keys import KeySpace

EXAM_TOKENS = 1024  # of a held-out pack
STEP_TOKENS = {"cpu": 1024, "cuda": 16384}  # fewer do not keep a GPU busy
# One of so many packs holds texts of the model's full length, so that an encoder learns every position. A decoder's are given.
LONG_EVERY = 8
# A lookup finds about half of a new text's windows whole, and about half of the others after one step (measured on
# held-out docstrings against tables of 900,000 tokens: 62, 27, 12 % with every n-gram, 49, 33, 18 % with those seen twice).
SHRINKING = 0.5


TextPack = tuple[list[np.ndarray], np.random.Generator]  # texts, and the chance that shortens or hides parts of them


@dataclass(frozen=True)
class Windowed:
    """Packed texts as their distinct windows."""

    windows: Tensor  # distinct windows x n: frequent n-grams are computed once
    window_of: Tensor  # the window of each token
    positions: Tensor
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class Lesson(Windowed):
    """Packed texts with the teacher's hidden states."""

    at_split: Tensor
    at_end: Tensor


def reading(
    config: BackboneConfig, documents: Sequence[np.ndarray], seed: int, device: torch.device, number: int = 0
) -> Iterator[TextPack]:
    """Yields endless packs of documents in a random order, from the `number`-th on, each with its own random generator.

    The n-th pack is always the same. `device`: for which a pack has its size, unless a single text has more tokens.
    """
    tokens = STEP_TOKENS.get(device.type, STEP_TOKENS["cpu"])
    lengths = np.array([len(document) for document in documents])
    place = passed = 0
    for epoch in count():
        for chosen in packed_batches(lengths, None, np.random.default_rng([seed, epoch]), tokens):
            place += 1
            for long in (False, True)[: 2 if place % LONG_EVERY == 0 and not config.is_decoder else 1]:
                if passed >= number:
                    chance = np.random.default_rng([seed, place, long])
                    texts = _long_texts(config, documents, tokens, chance) if long else [documents[i] for i in chosen]
                    yield texts, chance
                passed += 1


def _long_texts(
    config: BackboneConfig, documents: Sequence[np.ndarray], tokens: int, chance: np.random.Generator
) -> list[np.ndarray]:
    """Returns texts of the full length, made of consecutive documents."""
    longest, texts = config.positions, list[np.ndarray]()
    for _ in range(max(1, tokens // longest)):
        inner: list[np.ndarray] = []
        while sum(map(len, inner)) < longest - 2:
            inner.append(documents[chance.integers(len(documents))][1:-1])
        body = np.concatenate(inner)[: longest - 2]
        texts.append(np.concatenate([[config.cls_id], body, [config.sep_id]]).astype(np.int32))
    return texts


class Shrinking:
    """Finds the distinct windows of packed texts, most of them whole, some shortened as by a lookup's fallback.

    A decoder is served with whole windows, but predicts texts of other kinds better if it has learned with shortened ones too.
    """

    def __init__(self, config: BackboneConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self._space = KeySpace(config.vocabulary, config.window)
        shares = SHRINKING ** np.arange(len(config.window.levels()))
        self._shares = shares / shares.sum()

    def __call__(self, tokens: np.ndarray, lengths: np.ndarray, chance: np.random.Generator | None) -> Windowed:
        """`chance` None: all windows are whole."""
        levels = np.zeros(len(tokens), dtype=np.int64)
        if chance is not None:
            levels = chance.choice(len(self._shares), size=len(tokens), p=self._shares)
        keys, window_of = distinct(self._space.of(tokens, lengths) & self._space.masks[levels])
        numbers = self._space.unpack(keys), window_of, positions_of(lengths)
        windows, window_of, positions = (index_of(own, self.device) for own in numbers)
        return Windowed(windows, window_of, positions, lengths.tolist())


def lesson_of(windows: Shrinking, teacher: WholeBody, texts: list[np.ndarray], chance: np.random.Generator) -> Lesson:
    tokens = np.concatenate(texts)
    packed = windows(tokens, np.array([len(text) for text in texts]), chance)
    at_split, at_end = teacher.taught(index_of(tokens, windows.device), packed.positions, packed.lengths)
    return Lesson(**vars(packed), at_split=at_split, at_end=at_end)


def in_packs(documents: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Packs held-out documents, the same way on every device."""
    lengths = np.array([len(document) for document in documents])
    return [[documents[i] for i in chosen] for chosen in packed_batches(lengths, most_tokens=EXAM_TOKENS)]


def index_of(numbers: np.ndarray, device: torch.device) -> Tensor:
    return sent(numbers.astype(np.int64), device)


class SplitModel(nn.Module):
    """Lower and upper stack, one after the other, as they are served."""

    def __init__(self, lower: LowerStack, upper: UpperStack) -> None:
        super().__init__()
        self.lower, self.upper = lower, upper

    def sums(self, lesson: Windowed) -> Tensor:
        vectors = self.lower(lesson.windows)
        return self.lower.window.aggregate(vectors.index_select(0, lesson.window_of))

    def entered(self, lesson: Windowed) -> Tensor:
        """Returns the hidden states at the split."""
        return self.upper.enter(self.sums(lesson), lesson.positions, torch.zeros_like(lesson.positions))

    def forward(self, lesson: Windowed, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the hidden states at the split, and at the end as heads read them. `rows`: the tokens that are read there."""
        entered, config = self.entered(lesson), self.upper.config
        attend = attention_of(config, lesson.lengths, entered.device)
        turn = turn_of(config, lesson.positions, entered.dtype)
        return entered, self.upper.leave(through(self.upper.layers, entered, attend, rows=rows, turn=turn))
