"""Makes a step ready (rows found and gathered, adapters in slots, places in the cache), and computes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.layout import Layout
from hplm.adapters.layout_rows import LayoutRows, adapted, adapted_last, rows_by_layout
from hplm.adapters.slots import Slots
from hplm.arrays import Array, ranges, together
from hplm.engine.backbone import Backbone
from hplm.errors import HplmError
from hplm.generation.attention import Chunks, attention_over
from hplm.generation.cache import Cache, table_of
from hplm.generation.request import DecoderRequest, Sequence
from hplm.generation.running import Planned
from hplm.generation.sampler import score
from hplm.model.attention import avoid_plans
from hplm.model.cpu import keep_freed_memory
from hplm.model.layer import Attend
from hplm.model.products import Prepacked, can_prepack, replace_products
from hplm.model.stacks import UpperStack
from hplm.model.tensors import sent
from hplm.plot.computed import ComputedRows
from hplm.plot.forest import Chain
from hplm.plot.gathering import Gatherer


class ScoredRows(NamedTuple):
    """A prompt whose tokens get logprobs in this step."""

    request: DecoderRequest
    place: int  # of its first token in the step
    rows: slice  # among those of the step whose logits are needed


@dataclass(frozen=True)
class Staged:
    """A step as tensors: the new tokens of all its sequences, end to end."""

    planned: list[Planned]
    sums: Tensor
    positions: Tensor
    attend: Attend
    adapters: list[LayoutRows]
    last_adapters: list[LayoutRows]  # the same, for `rows`
    rows: Tensor  # the tokens whose logits are needed: the last one of each sequence that gets a next token, and scored prompts
    scored: Many[ScoredRows] = ()
    last: Tensor | None = None  # among `rows`: those of next tokens; None: all


class DecoderStager:
    """The loop's thread owns it. A running sequence holds the slot of its adapter."""

    def __init__(self, backbone: Backbone, cache: Cache, slots: int, resident_rows: int = 0, kept_bytes: int = 10**6) -> None:
        """`slots`: of each layout. `kept_bytes`: of rows that no table has."""
        self._backbone = backbone
        self._cache = cache
        self._count = slots
        self._device, self._dtype = cache.device, cache.dtype
        self._gatherer = Gatherer(cache.device, cache.dtype, resident_rows)
        self.computed = ComputedRows(backbone.config, cache.device, cache.dtype, backbone.lower, kept_bytes)
        self._slots: dict[Layout, Slots] = {}

    def slots(self) -> dict[Layout, Slots]:
        """Returns the slots by layout. Other threads may only read them."""
        return dict(self._slots)

    def hold(self, sequence: Sequence) -> None:
        """Gives the sequence's adapter a slot until `release`. Raises if its record is broken."""
        record = sequence.request.tenant.adapter
        if record is None:
            return
        layout = Layout.of(record.layout)
        slots = self._slots.get(layout)
        if slots is None:
            self._give_room_back()
            slots = self._slots[layout] = Slots(layout, self._count, self._device, layout.computed_in(self._dtype))
        sequence.adapter = slots, slots.hold(record, self._backbone.records)

    def _give_room_back(self) -> None:
        """Frees the slots of layouts that no tenant has any more, before another layout takes memory."""
        for layout in self._slots.keys() - self._backbone.layouts:
            if not self._slots[layout].pinned:
                del self._slots[layout]

    def release(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            slots, slot = sequence.adapter
            slots.release(slot)
            sequence.adapter = None

    def stage(self, planned: Many[Planned], broken: Callable[[Sequence, HplmError], None]) -> Staged | None:
        """Sequences whose stored rows are broken are passed to `broken`, and left out. Returns None if none is left."""
        forest = self._backbone.view.forest
        planned = sorted(planned, key=_place)
        found = self._found(planned)
        addresses = [own for own, _ in found]
        kept = self._gatherer.readable(forest, addresses, lambda number, error: broken(planned[number].sequence, error))
        # Others ended with another answer of their request.
        kept = [number for number in kept if planned[number].sequence.blocks is not None]
        if not kept:
            return None
        planned = [planned[number] for number in kept]
        addresses, keys = (together(own) for own in zip(*(found[number] for number in kept), strict=True))
        counts = np.array([one.count for one in planned], dtype=np.int64)
        before = np.array([one.sequence.computed for one in planned], dtype=np.int64)
        table, ends = table_of([one.sequence.blocks or () for one in planned]), np.cumsum(counts)
        seeded = any(one.sequence.request.sampling.seed is not None for one in planned)
        completes = np.array([one.completes for one in planned])
        scores = np.array([one.sequence.request.unscored > 0 for one in planned])
        needed = np.where(scores, counts, completes)  # of each sequence, the last tokens whose logits are needed
        until = np.cumsum(needed)
        slots = [one.sequence.adapter for one in planned]
        sums = self._gatherer.sums(forest, addresses, counts)
        self.computed.fill(sums, addresses, keys, [(one.sequence.request.tenant.chain.domain, one.count) for one in planned])
        placed = {own: own.fill() for own in self._slots.values()}, self._device
        return Staged(
            planned=list(planned),
            sums=sums,
            positions=self._sent(ranges(before, counts)),
            attend=attention_over(self._backbone.config, self._cache, Chunks(table, before, counts), seeded),
            adapters=rows_by_layout(slots, counts.tolist(), *placed),
            last_adapters=rows_by_layout(slots, needed.tolist(), *placed),
            rows=self._sent(ranges(ends - needed, needed)),
            scored=[
                ScoredRows(one.sequence.request, one.sequence.computed, slice(end - one.count, end))
                for one, end, scored in zip(planned, until.tolist(), scores, strict=True)
                if scored
            ],
            last=self._sent(until[completes] - 1) if scores.any() else None,
        )

    def _found(self, planned: Many[Planned]) -> list[tuple[Array, Array]]:
        """Looks the new tokens of each sequence up, with those before that their windows reach. Returns addresses and keys."""
        reach = self._backbone.config.window.n - 1
        of_chain: defaultdict[Chain, list[int]] = defaultdict(list)
        for number, one in enumerate(planned):
            of_chain[one.sequence.request.tenant.chain].append(number)
        found: dict[int, tuple[Array, Array]] = {}
        for chain, numbers in of_chain.items():
            texts = [planned[number].tokens(reach) for number in numbers]
            tokens, lengths = np.concatenate(texts), np.array([len(text) for text in texts])
            hits, keys = chain.lookup(tokens, lengths), chain.space.of(tokens, lengths)
            addresses = hits.addresses if self._backbone.lower(chain.domain) is None else hits.whole
            for number, end in zip(numbers, np.cumsum(lengths).tolist(), strict=True):
                own = slice(end - planned[number].count, end)
                found[number] = addresses[own], keys[own]
        return [found[number] for number in range(len(planned))]

    def _sent(self, numbers: Array) -> Tensor:
        return sent(numbers.astype(np.int64), self._device)


def _place(one: Planned) -> tuple[bool, int]:
    """Returns what the sequences of a step are sorted by: single tokens first, and those with the same adapter together."""
    return one.count > 1, one.sequence.adapter[1] if one.sequence.adapter is not None else -1


class Decoder:
    """Computes a staged step: the upper layers over its new tokens, and the logits of the tokens that come next."""

    def __init__(self, upper: UpperStack, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        if device.type == "cpu":
            keep_freed_memory()
        avoid_plans(device)
        self._upper = upper.to(device=device, dtype=dtype).eval().requires_grad_(False)
        if can_prepack(device, dtype):
            replace_products(self._upper, Prepacked)

    @torch.inference_mode()
    def run(self, step: Staged) -> Tensor:
        """Returns logits of the next token of each sequence that gets one: sequences x vocabulary, fp32."""
        last = len(self._upper.layers) - 1
        adapters = [partial(adapted, step.adapters, layer) for layer in range(last)]
        adapters.append(partial(adapted_last, step.adapters, step.last_adapters, last))
        x = self._upper(step.sums, step.positions, None, step.attend, adapters, step.rows)
        for request, place, rows in step.scored:
            score(request, place, x[rows], self._upper.logits)
        return self._upper.logits(x if step.last is None else x[step.last])

    def wait(self) -> None:
        """Returns when the device has computed all that was started, with the copies of adapters."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
