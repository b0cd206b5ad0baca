"""A sheet's way through the layers of a stage. Texts that are sure enough leave at exits; the others are not laid again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, pairwise

import torch
from torch import Tensor

from hplm.adapters.parts import Part, adapted
from hplm.arrays import Array
from hplm.engine.exits import Watch
from hplm.engine.sheets import Sheet
from hplm.model.layer import QKV, Plain
from hplm.model.means import with_means
from hplm.model.sending import sent
from hplm.model.tensors import array_of, tensor_of


@dataclass(slots=True)
class Computed:
    """Texts of a batch that are done: those that leave at an exit, or those that have passed all layers."""

    indexes: list[int]  # of the texts in the batch
    logits: list[Array]  # of each text: its answer rows x the size of the largest head, fp32
    exit: int | None = None  # None: behind all layers


@dataclass(slots=True)
class Passage:
    sheet: Sheet
    stage: int  # its number
    device: torch.device
    watch: Watch
    done: Callable[[], object]  # called behind each layer

    def run(self, x: Tensor, layers: Sequence[Plain], first: int, is_last: bool) -> Iterator[Computed]:
        """Yields texts that leave. The sheet gets the rows of the others: behind the last layer those that an answer reads.

        `first`: the number of the first of the layers, in the stack. Exit k is before layer k, whose work leaving spares.
        """
        sheet = self.sheet
        for number, layer in enumerate(layers, first):
            if len(asked := sheet.asked(number)):
                x = yield from self._at_exit(number, asked, x)
            if not sheet.texts:
                break
            adapters, rows = sheet.adapters[self.stage], None
            adapt = partial(adapted, adapters, number)
            if is_last and number == first + len(layers) - 1:
                rows, of_rows, _ = sheet.ending
                adapt = partial(_adapt_last, adapters, of_rows, number)
            x = layer(x, sheet.attend[self.stage], adapt, rows)
            self.done()
        sheet.hidden = x

    def _at_exit(self, exit: int, asked: Array, x: Tensor) -> Generator[Computed, None, Tensor]:
        """Yields the texts that leave at an exit, and returns the rows of the others."""
        sheet = self.sheet
        numbers: list[int] = asked.tolist()
        rows_of = sheet.rows_of[asked]
        reading, starts, lengths, heads = sheet.at_exit(asked, self.stage)
        parts = split(read(with_means(x, reading, rows_of, starts, lengths), heads, exit), rows_of)
        leaves = self.watch.leaving([sheet.texts[number] for number in numbers], parts, exit)
        if not leaves.any():
            return x
        yield Computed([sheet.indexes[number] for number in compress(numbers, leaves)], list(compress(parts, leaves)), exit)
        return x.index_select(0, sent(tensor_of(sheet.leave(asked[leaves])), self.device))


def _adapt_last(adapters: list[Part], of_rows: list[Part], layer: int, at: str, before: Tensor, after: Tensor) -> Tensor:
    """After its attention, the last layer computes only the tokens that an answer reads."""
    return adapted(adapters if at == QKV else of_rows, layer, at, before, after)


def split(logits: Tensor, rows_of: Array) -> list[Array]:
    """Returns the logits of each text."""
    whole, ends = array_of(logits.cpu()), rows_of.cumsum().tolist()
    return [whole[start:end] for start, end in pairwise([0, *ends])]


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
