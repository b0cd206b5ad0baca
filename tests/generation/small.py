"""A tiny random decoder with tables of two domains and tenants with adapters, and a loop that generates with it.

`Small.all_logits` is a reference: a whole sequence at once, without cache, slots or packing. Adapters are merged into weights.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import numpy as np
import torch

from hplm.adapters.bank import Bank, write_bank
from hplm.adapters.layout import adapter_layout
from hplm.adapters.record import Record
from hplm.generation.blocks import Blocks
from hplm.generation.cache import EARLY, Cache
from hplm.generation.choosing import Wish, choose
from hplm.generation.decoder import Decoder
from hplm.generation.draws import seed_of
from hplm.generation.line import Line
from hplm.generation.loop import Loop
from hplm.generation.promise import NO_PROMISE
from hplm.generation.ranges import Ranges
from hplm.generation.request import Request, Sequence, Source
from hplm.generation.room import Space, places_of
from hplm.generation.running import Running
from hplm.generation.sampling import Sampling
from hplm.generation.staging import Stager
from hplm.metrics.meter import Meter
from hplm.model.attention import PackedAttention
from hplm.model.config import RMS, UNUSED, BackboneConfig
from hplm.model.stacks import UpperStack
from hplm.model.windows import Window
from hplm.options import PAGED, SLOTTED
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.keys import KeySpace
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from tests.generation.world import Said
from tests.plot.tables import HIDDEN, make_table

CPU = torch.device("cpu")
VOCABULARY, START, END = 40, 1, 2
CONFIG = BackboneConfig(
    "small", VOCABULARY, HIDDEN, 4, 64, 0, 3, 512, 0, "silu", 1e-5, UNUSED, UNUSED, UNUSED, UNUSED, Window(3, causal=True),
    kv_heads=2, norm=RMS, pre_norm=True, biases=False, gated=True, rotary_base=10_000.0, start_id=START, end_ids=(END,),
)  # fmt: skip
MS = 1_000_000
KINDS = [SLOTTED, PAGED]
MARGIN = 1e-3  # between two logits that may be exchanged


def decode(ids):
    """Each token is one character."""
    return "".join(chr(0x4E00 + id) for id in ids)


class Small:
    def __init__(self, folder: Path, config: BackboneConfig = CONFIG) -> None:
        self.config = config
        torch.manual_seed(0)
        self.upper = UpperStack(config).eval().requires_grad_(False)
        self.upper.next_token.weight.mul_(8)  # so that one token is clearly the likeliest
        for layer in self.upper.layers:
            layer.qkv.weight.mul_(3)
        space = KeySpace(VOCABULARY, config.window)
        chance = np.random.default_rng(0)
        root = [(0, 0, token) for token in range(1, VOCABULARY + 1)]
        more = {tuple(gram) for gram in chance.integers(1, VOCABULARY + 1, (800, 3)).tolist()}
        pairs = {(0, *gram) for gram in chance.integers(1, VOCABULARY + 1, (400, 2)).tolist()}
        own = {tuple(gram) for gram in chance.integers(1, VOCABULARY + 1, (800, 3)).tolist()}
        tables = [
            make_table(folder, "root", None, space, [*root, *sorted(pairs), *sorted(more)]),
            make_table(folder, "law", "root", space, [*sorted(own), *sorted(pairs)[:50]], seed=1),
        ]
        self.forest = Forest([folder], assign_addresses(tables))
        self.sources = [self._source(folder, 0, "root", ()), self._source(folder, 1, "law", ())]
        for uid, domain, places in ((2, "root", ("query", "value")), (3, "law", ("key", "attention_out", "ffn_out"))):
            self.sources.append(self._source(folder, uid, domain, places))
        self.sources.append(self._source(folder, 4, "law", ("query", "value")))
        self._merged: dict[int, UpperStack] = {}

    def _source(self, folder, uid, domain, places):
        chain = self.forest.chain(domain, 1)
        if not places:
            return Source(f"tenant-{uid}", uid, 1, chain)
        layout = adapter_layout(self.config, "lora", 4, places)
        path = folder / f"{uid}-{layout.file_name}"
        flat = torch.randn(layout.layers, layout.layer_size, generator=torch.Generator().manual_seed(uid)) * 0.2
        write_bank(path, layout, [(uid, 1, flat)])
        return Source(f"tenant-{uid}", uid, 1, chain, (Record(path.name, 0, uid, 1), Bank(path)))

    @torch.no_grad()
    def all_logits(self, ids, source) -> torch.Tensor:
        """Returns the logits of the token behind each token."""
        upper = self._of(source)
        n = self.config.window.n
        grams = [tuple([0] * n + [id + 1 for id in ids[: i + 1]])[-n:] for i in range(len(ids))]
        sums = torch.stack([self._vector(gram, source.chain) for gram in grams])
        attend = PackedAttention([len(ids)], self.config.heads, causal=True)
        return upper.logits(upper(sums, torch.arange(len(ids)), None, attend))

    @cache  # noqa: B019
    def _vector(self, gram, chain):
        for level in range(len(gram)):
            shorter = (0,) * level + gram[level:]
            for table, _ in chain.links:
                (row,) = table.find(table.space.pack(np.array([shorter])))
                if row:
                    return table.rows.vectors(int(row))[0]
        raise LookupError(gram)

    def _of(self, source) -> UpperStack:
        """Returns the upper stack with the tenant's adapter merged into its weights."""
        if source.adapter is None:
            return self.upper
        if source.uid not in self._merged:
            upper = copy.deepcopy(self.upper)
            record, bank = source.adapter
            query, key = self.config.query_width, self.config.key_width
            rows = {"query": slice(0, query), "key": slice(query, query + key), "value": slice(query + key, query + 2 * key)}
            for layer, own in zip(upper.layers, bank.weights(record), strict=True):
                for place in bank.layout.places:
                    weight = layer.qkv.weight[rows[place]] if place in rows else getattr(layer, place).weight
                    weight.add_(own[f"{place}/b"].float() @ own[f"{place}/a"].float())
            self._merged[source.uid] = upper
        return self._merged[source.uid]


def space(kind, tokens, longest, block=16):
    """Returns room for a cache. A block is smaller than when serving, so that short sequences have several."""
    return Ranges(tokens, longest) if kind == SLOTTED else Blocks(tokens, longest, block)


def free_places(space) -> list[int]:
    """Returns the places that nobody owns, each as often as it is free."""
    if isinstance(space, Blocks):
        free = [(start, space.block) for start in space._free]
    else:
        free = [(start, size) for size, starts in space._free.items() for start in starts]
    return [place for start, size in free for place in range(start, start + size)]


class Poisoned(Cache):
    """Fills with NaN whatever is free, or not yet filled."""

    def __init__(self, *args):
        super().__init__(*args)
        self._memory.fill_(torch.nan)

    def give_back(self, own):
        super().give_back(own)
        self._poison(free_places(self.space))

    def grow(self, own, tokens, filled):
        grown = super().grow(own, tokens, filled)
        if grown is not None:
            empty = places_of([grown], np.array([filled]), np.array([grown.size - filled]))
            self._poison([*empty.tolist(), *free_places(self.space)])
        return grown

    def _poison(self, at):
        self._memory[:, :, torch.tensor(at, dtype=torch.int64)] = torch.nan


class Generating:
    """A loop on a clock of its own: each step takes a millisecond."""

    def __init__(
        self, small: Small, tokens=1024, seats=8, step_tokens=64, cleaning=EARLY, order="fcfs", admission=False, limit=1000,
        kind=SLOTTED, block=16,
    ) -> None:  # fmt: skip
        self.small = small
        self.now = 1
        self.layouts = {source.adapter[1].layout for source in small.sources if source.adapter is not None}
        config = small.config
        cache = Poisoned(space(kind, tokens, config.positions, block), config.upper_layers, config.key_width, CPU)
        self.line = Line(policy(order), Limits(limit, 10**9), cache.space.size_for, admission)
        self.stager = Stager(config, lambda: small.forest, lambda: self.layouts, cache, seats, CPU, torch.float32)
        self.meter = Meter()
        self.loop = Loop(
            self.line,
            Running(cache, seats, step_tokens, cleaning),
            self.stager,
            Decoder(small.upper, CPU, torch.float32),
            config.end_ids,
            self._tick,
            lambda request, piece: request.respond(piece),
            self.meter,
        )
        self.said: list[Said] = []

    @property
    def space(self) -> Space:
        return self.loop.running.cache.space

    def _tick(self) -> int:
        self.now += MS // 2
        return self.now

    def ask(self, prompt, sampling: Sampling, tenant=0, promise=NO_PROMISE, seed=0, echo="", priority=0, waited_ns=0) -> Said:
        """`waited_ns`: at the front door."""
        source = self.small.sources[tenant]
        prompt = [START, *prompt]
        addresses = source.chain.lookup(np.array(prompt), np.array([len(prompt)])).addresses
        said: Said = None  # pyright: ignore[reportAssignmentType]
        request = Request(
            source, prompt, addresses, sampling, lambda piece: said(piece), decode,
            arrival_ns=self.now - waited_ns, seed=seed, echo=echo, promise=promise, priority=priority,
        )  # fmt: skip
        said = Said(request)
        self.loop.check(request)
        self.line.offer(Sequence(request), self.now)
        self.said.append(said)
        return said

    def run(self, most=10_000) -> None:
        """Steps until everything has ended."""
        for _ in range(most):
            if not self.loop.step() and not len(self.loop.running) and not len(self.line):
                break
        else:
            raise AssertionError("it does not end")
        assert all(said.ended for said in self.said)
        assert self.loop.running.free == self.space.tokens
        while self.loop.running._forget():
            pass
        assert self.space.free == self.space.tokens and not self.loop.running._kept
        assert not any(pins for slots in self.stager.slots().values() for pins in slots._pins)


def same_as_reference(small: Small, said: Said, choice: int = 0) -> int:
    """Compares an answer with the reference, token by token. Returns how many tokens were compared.

    Where nearly equal logits would give another token, both are right, and what follows is not compared.
    """
    request, ids = said.request, list(said.request.prompt)
    sampling, found = request.sampling, said.ids(choice)
    seed, prompt = seed_of(request.seed, choice), len(request.prompt)
    of_each = small.all_logits([*ids, *found], request.source)[prompt - 1 :]
    for place, (token, logits) in enumerate(zip(found, of_each, strict=False)):
        barred = [END, *sampling.stop_token_ids] if place < sampling.min_tokens else ()
        wish = Wish(sampling, seed, place, np.array(ids), prompt, barred)
        if choose(logits[None].clone(), [wish])[0].id != token:
            near = [logits + torch.randn(len(logits), generator=torch.Generator().manual_seed(i)) * MARGIN for i in range(50)]
            assert token in {choose(one[None], [wish])[0].id for one in near}, f"token {place} of {found}"
            return place
        ids.append(token)
    return len(found)
