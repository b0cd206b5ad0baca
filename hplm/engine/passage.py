"""A sheet's way through the layers of a stage. Texts that are sure enough leave at exits; the others are not laid again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.parts import Part, adapted
from hplm.arrays import Array
from hplm.engine.exits import Watch
from hplm.engine.request import Text
from hplm.engine.sheets import Present, Sheet, index
from hplm.model.layer import QKV, Layer
from hplm.model.means import with_means
from hplm.model.tensors import array_of


@dataclass(frozen=True)
class Computed:
    """Texts of a batch that are done: those that leave at an exit, or those that have passed all layers."""

    indexes: list[int]  # of the texts in the batch
    logits: list[Array]  # of each text: its answer rows x the size of the largest head, fp32
    exit: int | None = None  # None: behind all layers


@dataclass(frozen=True)
class Passage:
    sheet: Sheet
    stage: int  # its number
    device: torch.device
    watch: Watch
    done: Callable[[], object]  # called behind each layer

    def run(self, x: Tensor, layers: Sequence[Layer], first: int, is_last: bool) -> Iterator[Computed]:
        """Yields texts that leave. The sheet gets the rows of the others: behind the last layer those that an answer reads.

        `first`: the number of the first of the layers, in the stack. Exit k is before layer k, whose work leaving spares.
        """
        for number, layer in enumerate(layers, first):
            x = yield from self._at_exit(number, x)
            now = self.sheet.now
            if not now.texts:
                break
            if is_last and number == first + len(layers) - 1:
                x = layer(x, now.attend[self.stage], partial(_adapt_last, now, number), now.end.reading)
            else:
                x = layer(x, now.attend[self.stage], partial(adapted, now.adapters[self.stage], number))
            self.done()
        self.sheet.hidden = x

    def _at_exit(self, exit: int, x: Tensor) -> Generator[Computed, None, Tensor]:
        """Yields the texts that leave at an exit, and returns the rows of the others."""
        asked, now = self.sheet.asked(exit), self.sheet.now
        if not len(asked):
            return x
        numbers: list[int] = asked.tolist()
        texts = [now.texts[number] for number in numbers]
        logits = read(self._seen(asked, texts, x), self.sheet.exit_heads(asked, self.stage), exit)
        parts = [array_of(part) for part in logits.cpu().split_with_sizes(now.rows_of[asked].tolist())]
        leaves = self.watch.leaving(texts, parts, exit)
        if not leaves.any():
            return x
        yield Computed([now.indexes[number] for number in compress(numbers, leaves)], list(compress(parts, leaves)), exit)
        return x.index_select(0, index(self.sheet.leave(asked[leaves]), self.device))

    def _seen(self, asked: Array, texts: Sequence[Text], x: Tensor) -> Tensor:
        """Returns the rows that an exit reads: each token that an answer is about, with the mean of its text's tokens."""
        now = self.sheet.now
        starts, rows_of = now.arrangement.starts[asked], now.rows_of[asked]
        reading = np.concatenate([text.reading for text in texts]) + np.repeat(starts, rows_of)
        return with_means(x, reading, rows_of, starts, now.arrangement.lengths[asked])


def _adapt_last(now: Present, layer: int, at: str, before: Tensor, after: Tensor) -> Tensor:
    """After its attention, the last layer computes only the tokens that an answer reads."""
    return adapted(now.adapters[-1] if at == QKV else now.end.adapters, layer, at, before, after)


def read(x: Tensor, parts: list[Part], layer: int = 0) -> Tensor:
    """Returns logits: rows x the size of the largest head in the batch. `layer`: of the heads' records."""
    for part in parts:
        part.arrived[layer].wait()
    if len(parts) == 1:
        return parts[0].layout.read(x, parts[0].groups, parts[0].layers[layer])
    results: list[tuple[Tensor, Tensor]] = []
    for part in parts:
        assert part.rows is not None  # with several heads, no head has all rows
        results.append((part.rows, part.layout.read(x.index_select(0, part.rows), part.groups, part.layers[layer])))
    logits = x.new_zeros(len(x), max(result.shape[1] for _, result in results))
    for rows, result in results:
        logits[rows, : result.shape[1]] = result
    return logits
