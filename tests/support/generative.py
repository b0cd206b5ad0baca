"""The reference for decoders: whole sequences, token by token, without a cache. Generated tokens must equal its tokens.

It reads the same stored files as the engine, but computes in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from torch import Tensor, nn

from hplm.engine.backbone import Backbone
from hplm.model.layer import Layer, activation
from hplm.model.stacks import LowerStack, UpperStack
from hplm.tenants.snapshot import Tenant
from testing.reference import Dictionaries, adapters_of, normed, turned, windows_of


@dataclass(frozen=True)
class Written:
    """Generated tokens. `margins`: by how much the logit of each is above that of the second best."""

    tokens: list[int]
    margins: list[float]

    def sure(self) -> int:
        """Returns how many tokens come before the first that is chosen so closely that rounding may change it."""
        return next((i for i, margin in enumerate(self.margins) if margin <= 1e-3), len(self.tokens))

    def agrees(self, tokens: Sequence[int]) -> bool:
        """Whether all tokens are the same that rounding cannot change."""
        sure = self.sure()
        return list(tokens[:sure]) == self.tokens[:sure] and len(tokens) <= len(self.tokens)


class GenerativeReference:
    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self._dictionaries = Dictionaries(backbone.config.window)
        self._computed = cache(self._compute)

    @cached_property
    def _upper(self) -> UpperStack:
        return self.backbone.upper()

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], tenant_id: str, count: int) -> Written:
        """Returns the likeliest tokens behind a prompt, which begins with the start id, up to one that ends a text."""
        tokens, written = list(prompt), Written([], [])
        for _ in range(count):
            values, likeliest = self.logits(tokens, tenant_id)[-1].topk(2)
            best, second = values.tolist()
            tokens.append(int(likeliest[0]))
            written.tokens.append(tokens[-1])
            written.margins.append(best - second)
            if tokens[-1] in self.backbone.config.end_ids:
                break
        return written

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], tenant_id: str) -> Tensor:
        """Returns the logits of the token behind each token of a sequence: tokens x vocabulary."""
        tenant, config, upper = self.backbone.view.snapshot.find(tenant_id), self.backbone.config, self._upper
        x = self._lower_half([int(token) for token in tokens], tenant)
        if config.has_places:
            x = x + upper.positions.weight[: len(x)]
        for layer, adapted in zip(upper.layers, adapters_of(self.backbone, tenant.adapter, config.upper_layers), strict=True):
            x = self._through(layer, x, adapted)
        return normed(x, upper.final_norm) @ upper.next_token.weight.T

    def _lower_half(self, tokens: list[int], tenant: Tenant) -> Tensor:
        tables = [table for table, _ in self.backbone.view.forest.chain(tenant.domain, tenant.domain_version).links]
        lower, rows = self.backbone.lower(tables[0]), list[Tensor]()
        for window in windows_of(self.backbone.config.window, [tokens]).tolist():
            level, link, row = self._dictionaries.find(window, tables)
            is_missing = level > 0 and lower is not None
            rows.append(self._computed(lower, tuple(window)) if is_missing else tables[link].rows.vectors(row)[0])
        return torch.stack(rows)

    def _compute(self, lower: LowerStack, window: tuple[int, ...]) -> Tensor:
        """Returns the row of a window, which is read as a text behind the start id."""
        config, ids = self.backbone.config, [token - 1 for token in window if token]
        ids = [config.start_id, *ids[ids[0] == config.start_id :]]
        places = lower.places[: len(ids)] if config.has_places else torch.zeros(len(ids), 1)
        x = lower.words.weight[ids] + places
        for layer in lower.layers:
            x = self._through(layer, x, lambda place, before, after: after)
        return (x - places)[-1].half().float()

    def _through(self, layer: Layer, x: Tensor, adapted: Callable[[str, Tensor, Tensor], Tensor]) -> Tensor:
        config = self.backbone.config
        read = normed(x, layer.attention_norm)
        query, key, value = layer.qkv(read).split([config.query_width, config.key_width, config.key_width], dim=1)
        query, key = adapted("query", read, query), adapted("key", read, key)
        if config.head_norms:
            query, key = self._by_heads(query, layer.query_norm), self._by_heads(key, layer.key_norm)
        seen = self._attention(query, key, adapted("value", read, value))
        x = x + adapted("attention_out", seen, layer.attention_out(seen))
        read = normed(x, layer.ffn_norm)
        inner, function = layer.ffn_in(read), activation(config.activation)
        if config.gated:
            gate, inner = inner.chunk(2, dim=1)
            inner = function(adapted("ffn_gate", read, gate)) * adapted("ffn_in", read, inner)
        else:
            inner = function(adapted("ffn_in", read, inner))
        return x + adapted("ffn_out", inner, layer.ffn_out(inner))

    def _by_heads(self, x: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> Tensor:
        return torch.cat([normed(head, norm) for head in x.split(self.backbone.config.head_size, dim=1)], dim=1)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Computes one head after the other. Neighbouring heads of queries share one of keys and values."""
        config, size = self.backbone.config, self.backbone.config.head_size
        shared = query.shape[1] // key.shape[1]
        later = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
        heads: list[Tensor] = []
        for head in range(config.heads):
            own, of_keys = slice(head * size, head * size + size), slice(head // shared * size, head // shared * size + size)
            turns = partial(turned, base=config.rotary_base) if config.rotary_base is not None else lambda x: x
            scores = turns(query[:, own]) @ turns(key[:, of_keys]).T / size**0.5
            heads.append(torch.softmax(scores.masked_fill(later, -torch.inf), dim=1) @ value[:, of_keys])
        return torch.cat(heads, dim=1)
