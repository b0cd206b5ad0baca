"""What adaptation reads: documents in packs, windows shrunk as a lookup shrinks them, the teacher's view beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from builder.adaptation.teacher import Teacher
from builder.packs import packs, positions_of
from hplm.model.attention import PackedAttention
from hplm.model.config import BackboneConfig
from hplm.model.stacks import LowerStack, UpperStack
from hplm.plot.keys import KeySpace, first_of_each, order

PACK_TOKENS = 1024
LONG_EVERY = 8  # packs: one of so many holds texts as long as the model takes, so that every position is met
# A lookup finds about half of a new text's windows whole, and about half of the others after one step (measured on
# held-out docstrings against tables of 900,000 tokens: 62, 27, 12 % with every n-gram, 49, 33, 18 % with those seen twice).
SHRINKING = 0.5


@dataclass(frozen=True)
class Lesson:
    """Texts end to end, their distinct windows, and what the teacher makes of them."""

    windows: Tensor  # distinct ones x n: frequent n-grams are computed once
    window_of: Tensor  # which of them each token has
    positions: Tensor
    lengths: list[int]
    at_split: Tensor
    at_end: Tensor

    @property
    def tokens(self) -> int:
        return len(self.positions)


class Windows:
    """The distinct windows of packed texts, and which of them each token has: frequent n-grams are computed once."""

    def __init__(self, config: BackboneConfig) -> None:
        self.space = KeySpace(config.vocabulary, config.window)

    def whole(self, tokens: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
        return self.shrunk(tokens, lengths, np.zeros(len(tokens), dtype=np.int64))

    def shrunk(self, tokens: np.ndarray, lengths: np.ndarray, levels: np.ndarray) -> tuple[Tensor, Tensor]:
        """Each window at a level of the fallback."""
        keys, window_of = _distinct(self.space.of(tokens, lengths) & self.space.masks[levels])
        return torch.from_numpy(self.space.unpack(keys).astype(np.int64)), torch.from_numpy(window_of)


class Lessons:
    def __init__(self, config: BackboneConfig, teacher: Teacher, device: torch.device) -> None:
        self._config = config
        self._teacher = teacher
        self._device = device
        self._space = KeySpace(config.vocabulary, config.window)
        self._levels = config.window.levels()
        shares = SHRINKING ** np.arange(len(self._levels))
        self._shares = shares / shares.sum()

    def endless(self, documents: Sequence[np.ndarray], rng: np.random.Generator) -> Iterator[Lesson]:
        lengths = np.array([len(document) for document in documents])
        number = 0
        while True:
            for chosen in packs(lengths, PACK_TOKENS, len(documents), rng):
                yield self.lesson([documents[i] for i in chosen], rng)
                number += 1
                if number % LONG_EVERY == 0:
                    yield self.lesson(self._long_texts(documents, rng), rng)

    def once(self, documents: Sequence[np.ndarray], rng: np.random.Generator) -> list[Lesson]:
        lengths = np.array([len(document) for document in documents])
        return [self.lesson([documents[i] for i in chosen], rng) for chosen in packs(lengths, PACK_TOKENS, len(documents))]

    def lesson(self, texts: list[np.ndarray], rng: np.random.Generator) -> Lesson:
        lengths = np.array([len(text) for text in texts])
        tokens = np.concatenate(texts)
        chosen = rng.choice(len(self._levels), size=len(tokens), p=self._shares)
        keys, window_of = _distinct(self._space.of(tokens, lengths) & self._space.masks[chosen])
        positions = self._index(positions_of(lengths))
        at_split, at_end = self._teacher(self._index(tokens), positions, lengths.tolist())
        distinct = self._index(self._space.unpack(keys))
        return Lesson(distinct, self._index(window_of), positions, lengths.tolist(), at_split, at_end)

    def _long_texts(self, documents: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
        """Documents run together, up to the last position."""
        longest = self._config.positions
        texts = []
        for _ in range(max(1, PACK_TOKENS // longest)):
            inner: list[np.ndarray] = []
            while sum(map(len, inner)) < longest - 2:
                inner.append(documents[rng.integers(len(documents))][1:-1])
            body = np.concatenate(inner)[: longest - 2]
            texts.append(np.concatenate([[self._config.cls_id], body, [self._config.sep_id]]).astype(np.int32))
        return texts

    def _index(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device)


def _distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys, and which of them each is."""
    sorting = order(keys)
    starts = first_of_each(keys[sorting])
    which = np.empty(len(keys), dtype=np.int64)
    which[sorting] = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(keys))))
    return keys[sorting[starts]], which


class Student(nn.Module):
    """Lower and upper stack, one after the other, as lookup and upper are when serving."""

    def __init__(self, lower: LowerStack, upper: UpperStack) -> None:
        super().__init__()
        self.lower, self.upper = lower, upper

    def sums(self, lesson: Lesson) -> Tensor:
        return self.lower.window.aggregate(self.lower(lesson.windows).index_select(0, lesson.window_of))

    def forward(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """Hidden states where the model is split, and at the end."""
        segments = torch.zeros_like(lesson.positions)
        attend = PackedAttention(lesson.lengths, self.lower.heads)
        x = entered = self.upper.enter(self.sums(lesson), lesson.positions, segments)
        for layer in self.upper.layers:
            x = layer(x, attend)
        return entered, x
