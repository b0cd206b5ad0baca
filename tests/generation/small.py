"""A tiny random decoder with tables of two domains and tenants with adapters: a model for `World`.

`Small.all_logits` is a reference: a whole sequence at once, without cache, slots or packing. Adapters are merged into weights.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import numpy as np
import torch

from hplm.adapters.layout import Layout, adapter_layout
from hplm.adapters.records import Records, pack, write
from hplm.generation.decoder import Decoder
from hplm.generation.request import Source
from hplm.generation.staging import Stager
from hplm.model.attention import PackedAttention
from hplm.model.config import RMS, UNUSED, BackboneConfig
from hplm.model.stacks import UpperStack
from hplm.model.windows import Window
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.keys import KeySpace
from tests.generation.fake import END, VOCABULARY
from tests.generation.world import CPU, START
from tests.plot.tables import HIDDEN, make_table

CONFIG = BackboneConfig(
    "small", VOCABULARY, HIDDEN, 4, 64, 0, 3, 512, 0, "silu", 1e-5, UNUSED, UNUSED, UNUSED, UNUSED, Window(3, causal=True),
    kv_heads=2, norm=RMS, pre_norm=True, biases=False, gated=True, rotary_base=10_000.0, start_id=START, end_ids=(END,),
)  # fmt: skip


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
        self.records = Records(folder)
        self.sources = [self._source(folder, 0, "root", ()), self._source(folder, 1, "law", ())]
        for uid, domain, places in ((2, "root", ("query", "value")), (3, "law", ("key", "attention_out", "ffn_out"))):
            self.sources.append(self._source(folder, uid, domain, places))
        self.sources.append(self._source(folder, 4, "law", ("query", "value")))
        self.layouts = {Layout.of(source.adapter.layout) for source in self.sources if source.adapter is not None}
        self._merged: dict[int, UpperStack] = {}

    def addresses(self, source, prompt):
        return source.chain.lookup(np.array(prompt), np.array([len(prompt)])).addresses

    def machine(self, world, cache, seats):
        stager = Stager(self.config, lambda: self.forest, lambda: self.layouts, self.records, cache, seats, CPU, torch.float32)
        return stager, Decoder(self.upper, CPU, torch.float32)

    def _source(self, folder, uid, domain, places):
        chain = self.forest.chain(domain, 1)
        if not places:
            return Source(f"tenant-{uid}", uid, 1, chain)
        layout = adapter_layout(self.config, "lora", 4, places)
        flat = torch.randn(layout.layers, layout.layer_size, generator=torch.Generator().manual_seed(uid)) * 0.2
        made = write(folder, pack({"adapter": (layout, layout.unpack(flat))}))
        return Source(f"tenant-{uid}", uid, 1, chain, made["adapter"])

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
            record = source.adapter
            query, key = self.config.query_width, self.config.key_width
            rows = {"query": slice(0, query), "key": slice(query, query + key), "value": slice(query + key, query + 2 * key)}
            for layer, own in zip(upper.layers, self.records.weights(record), strict=True):
                for place in Layout.of(record.layout).places:
                    weight = layer.qkv.weight[rows[place]] if place in rows else getattr(layer, place).weight
                    weight.add_(own[f"{place}/b"].float() @ own[f"{place}/a"].float())
            self._merged[source.uid] = upper
        return self._merged[source.uid]
