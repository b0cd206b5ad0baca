"""The reference: one text of one tenant, step by step, slow and obvious. Served answers must equal its answers.

It reads the same stored files as the engine, but computes in another way: without packing, slots, groups or batched lookup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hplm.adapters.layout import Layout
from hplm.adapters.record import Record
from hplm.engine.backbone import Backbone
from hplm.engine.exits import is_audited
from hplm.lookup.lookup import Lookup
from hplm.model.config import BackboneConfig
from hplm.model.layer import activation
from hplm.model.products import weight_levels
from hplm.model.stacks import UpperStack
from hplm.model.tokenizer import Encoded, Tokenizer
from hplm.model.windows import Window
from hplm.model.word_spans import words_of
from hplm.plot.table import Table
from hplm.tasks.answers import HOLDS, LONGEST_ANSWER
from hplm.tenants.embedding import Embedding
from hplm.tenants.snapshot import Tenant, TenantWeights


@dataclass(frozen=True)
class ExpectedAnswer:
    """The expected answer."""

    labels: list[str]
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class PassagePiece:
    """A piece of a passage: its code points, and the logits of its start and its end."""

    start: int
    stop: int
    logits: tuple[float, float]

    @property
    def sum(self) -> float:
        return sum(self.logits)


@dataclass(frozen=True)
class PassageWindow:
    """A part of a passage that the model reads at a time, with the question."""

    logits: Tensor  # of the window's first token, then of each token of the passage
    offsets: list[list[int]]  # of each token of the passage

    @property
    def best(self) -> PassagePiece:
        tokens, ends = len(self.offsets), self.logits[1:].tolist()
        pairs = [(i, j) for i in range(tokens) for j in range(i, min(i + LONGEST_ANSWER, tokens))]
        pieces = [PassagePiece(self.offsets[i][0], self.offsets[j][1], (ends[i][0], ends[j][1])) for i, j in pairs]
        return max(pieces, key=lambda piece: piece.sum)


@dataclass(frozen=True)
class Reference:
    backbone: Backbone
    eight_bits: bool = False  # multiplies the shared matrices in 8 bits

    @classmethod
    def open(cls, folder: Path, state: Path | None = None, eight_bits: bool = False) -> Reference:
        return cls(Backbone(folder, state), eight_bits)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.backbone.tokenizer()

    @cached_property
    def _lookup(self) -> Lookup:
        return Lookup(self.backbone)

    @cached_property
    def _upper(self) -> UpperStack:
        return self.backbone.upper()

    @torch.no_grad()
    def forward(
        self, text: str, tenant_id: str, pair: str | None = None, truncate: bool = False, students: int | None = None,
        prefix: str | None = None, dimensions: int = 0,
    ) -> Tensor:  # fmt: skip
        """Returns fp32 logits with a row for each answer row, or for `span`, for the first token and each of the passage.

        A word without a token gets zeros. `students`: how many answer; None: the largest team. For `embed` the row is the
        vector, of so many dimensions (0: the tenant's), of the text behind the prefix of this name (None: the tenant's).
        """
        tenant = self.backbone.view.snapshot.find(tenant_id)
        if tenant.embedding is not None:
            return self._vector(text, tenant, tenant.embedding, prefix, dimensions, truncate)
        if tenant.task == "span":
            return torch.cat([window.logits for window in self.windows(text, tenant_id, pair, truncate)])
        encoded = self._tokenizer.encode(text, pair, truncate)
        read = _tokens_of_words(text, encoded) if tenant.task == "tag" else [0]
        leaves_at = [i for i in read if i is not None] or [0]
        if tenant.exits is not None and self._is_audited(text, tenant, pair, truncate):
            leaves_at = []
        if tenant.students is None:
            logits = self._computed(encoded.tokens, encoded.segments, tenant, leaves_at)
        else:
            team, depth = tenant.student_weights[: students or tenant.students.teams[0].members], tenant.students.depth
            logits = torch.stack(
                [self._computed(encoded.tokens, encoded.segments, tenant, student=one, depth=depth) for one in team]
            ).sum(0)
        if tenant.task in ("classify", "multilabel", "regress"):
            return logits[:1]
        if tenant.task != "tag":
            raise NotImplementedError(f"task {tenant.task!r}: define in {__name__} which rows its head reads")
        return torch.stack([torch.zeros(len(tenant.labels)) if i is None else logits[i] for i in read])

    def _vector(self, text: str, tenant: Tenant, own: Embedding, prefix: str | None, dimensions: int, truncate: bool) -> Tensor:
        name = own.prefix if prefix is None else prefix
        encoded = self._tokenizer.encode((own.prefixes[name] if name else "") + text, None, truncate)
        kept = np.append(np.arange(own.limit - 1), -1) if own.limit and own.limit < len(encoded.tokens) else slice(None)
        states = self._computed(encoded.tokens[kept], encoded.segments[kept], tenant)
        pooled = states.sum(0) / len(states) if own.pooling == "mean" else states[0]
        cut = pooled[: dimensions or own.dimensions]
        return (cut / cut.square().sum().sqrt() if own.normalised else cut)[None]

    def _is_audited(self, text: str, tenant: Tenant, pair: str | None, truncate: bool) -> bool:
        found = self._lookup.resolve(self.backbone.view, tenant, [text], None if pair is None else [pair], truncate)
        return is_audited(found.addresses)

    @torch.no_grad()
    def windows(self, text: str, tenant_id: str, pair: str | None, truncate: bool = False) -> list[PassageWindow]:
        """Returns what the head of a tenant with the task `span` says of each window of the passage."""
        tenant = self.backbone.view.snapshot.find(tenant_id)
        encoded, found, start = self._tokenizer.encode(text, pair, truncate, in_windows=True), [], 0
        for length in encoded.lengths.tolist():
            window = slice(start, start + length)
            logits = self._computed(encoded.tokens[window], encoded.segments[window], tenant)
            passage = [i for i in range(start, start + length) if encoded.parts[i] == 1]
            found.append(PassageWindow(logits[[0, *(i - start for i in passage)]], encoded.offsets[passage].tolist()))
            start += length
        return found

    def _computed(
        self, tokens: np.ndarray, segments: np.ndarray, tenant: Tenant, read: Sequence[int] = (),
        student: TenantWeights | None = None, depth: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns what the tenant's head says of each token, or that of the first exit that is sure of all tokens in `read`.

        With a `student`, what its head says behind `depth` layers. Without a head, the states of the tokens.
        """
        config, upper, weights = self.backbone.config, self._upper, student or tenant.weights
        layers = upper.layers[:depth]
        adapters = adapters_of(self.backbone, weights.adapter, len(layers))
        x = self.lower_half([int(token) for token in tokens], tenant)
        if config.has_places:
            x = x + upper.positions.weight[: len(x)]
        if config.segments:
            x = x + upper.segments.weight[segments.astype(np.int64)]
        if not config.pre_norm:
            x = normed(x, upper.norm)
        if (left := self._at_exit(0, x, tenant, read)) is not None:
            return left
        for number, (layer, own) in enumerate(zip(layers, adapters, strict=True), start=1):
            before, behind = (normed, _unchanged) if config.pre_norm else (_unchanged, normed)
            given = before(x, layer.attention_norm)
            parts = self._product(given, layer.qkv).split([config.query_width, config.key_width, config.key_width], dim=1)
            named = zip(("query", "key", "value"), parts, strict=True)
            seen = _attention(*(own(name, given, part) for name, part in named), config, config.lower_layers + number - 1)
            x = behind(x + own("attention_out", seen, self._product(seen, layer.attention_out)), layer.attention_norm)
            given, function = before(x, layer.ffn_norm), activation(config.activation)
            inner = self._product(given, layer.ffn_in)
            if config.gated:
                gate, inner = inner.chunk(2, dim=1)
                inner = function(own("ffn_gate", given, gate)) * own("ffn_in", given, inner)
            else:
                inner = function(own("ffn_in", given, inner))
            x = behind(x + own("ffn_out", inner, self._product(inner, layer.ffn_out)), layer.ffn_norm)
            if (left := self._at_exit(number, x, tenant, read)) is not None:
                return left

        x = self._left(x)
        if weights.head is None:
            return x
        layout = Layout.of(weights.head.layout)
        (head,) = self.backbone.records.weights(weights.head)
        if layout.kind == "head2":
            x = activation(layout.function)(x @ head["dense"].float().T + head["dense_bias"].float())
        return (x @ head["weight"].float().T + head["bias"].float())[:, : len(tenant.labels)]

    def _left(self, x: Tensor) -> Tensor:
        """Returns what heads read."""
        return normed(x, self._upper.final_norm) if self.backbone.config.pre_norm else x

    def _at_exit(self, exit: int, x: Tensor, tenant: Tenant, read: Sequence[int]) -> Tensor | None:
        """Returns the logits of each token at an exit; None if there is none, or if it is not sure of all tokens in `read`."""
        exits = tenant.exits
        if exits is None or exits.record is None or not read or exits.plans[0].exit != exit:
            return None
        weights, x = self.backbone.records.weights(exits.record)[exit], self._left(x)
        seen = torch.cat([x, x.mean(dim=0, keepdim=True).expand_as(x)], dim=1)
        inner = torch.relu(seen @ weights["dense"].float().T + weights["dense_bias"].float())
        outputs = inner @ weights["weight"].float().T + weights["bias"].float()
        labels = len(tenant.labels)
        sure = _sure(outputs[list(read)].double(), labels, tenant.task, exits.calibrations[exit].temperature)
        return outputs[:, :labels] if sure >= exits.plans[0].threshold else None

    @torch.no_grad()
    def answer(self, text: str, tenant_id: str, pair: str | None = None, truncate: bool = False) -> ExpectedAnswer:
        """Returns the answer that a client must get, computed from the definitions of the tasks."""
        tenant = self.backbone.view.snapshot.find(tenant_id)
        if tenant.task == "span":
            assert pair is not None  # the passage
            windows = self.windows(text, tenant_id, pair, truncate)
            found = max((window.best for window in windows), key=lambda piece: piece.sum)
            if "none" in tenant.labels and min(float(window.logits[0, 2]) for window in windows) > found.sum:
                return ExpectedAnswer([""], [(0, 0)])
            return ExpectedAnswer([pair[found.start : found.stop]], [(found.start, found.stop)])
        logits = self.forward(text, tenant_id, pair, truncate)
        if tenant.task == "embed":
            return ExpectedAnswer([""], [(0, len(text))])
        if tenant.task == "regress":
            return ExpectedAnswer([f"{float(logits[0, 0]):.6g}"], [(0, len(text))])
        if tenant.task == "multilabel":
            held = [i for i in logits[0].argsort(descending=True).tolist() if torch.sigmoid(logits[0, i]) >= HOLDS]
            return ExpectedAnswer([tenant.labels[i] for i in held], [(0, len(text))] * len(held))
        if tenant.task not in ("classify", "tag"):
            raise NotImplementedError(f"task {tenant.task!r}: define in {__name__} how an answer is read from its logits")
        best = [tenant.labels[int(row.argmax())] for row in logits]
        if tenant.task == "classify":
            return ExpectedAnswer(best, [(0, len(text))])
        read = _tokens_of_words(text, self._tokenizer.encode(text, pair, truncate))
        return ExpectedAnswer(["" if i is None else label for i, label in zip(read, best, strict=True)], words_of(text))

    def _product(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return product_in_eight_bits(x, linear) if self.eight_bits else linear(x)

    def lower_half(self, tokens: list[int], tenant: Tenant) -> Tensor:
        links = self.backbone.view.forest.chain(tenant.domain, tenant.domain_version).links
        return self._dictionaries.sums(tokens, [table for table, _ in links])

    @cached_property
    def _dictionaries(self) -> Dictionaries:
        return Dictionaries(self.backbone.config.window)


def windows_of(window: Window, texts: Iterable[Sequence[int]]) -> np.ndarray:
    """Returns the window of each token, as id + 1: tokens x n. Beyond the ends of a text stand zeros."""
    n, centre = window.n, window.centre
    of_texts = [
        [text[place] + 1 if 0 <= place < len(text) else 0 for place in range(middle - centre, middle - centre + n)]
        for text in texts
        for middle in range(len(text))
    ]
    return np.array(of_texts, dtype=np.int64)


class Dictionaries:
    """Looks up windows in dictionaries instead of the tables' own indexes. Tables are a domain's, its parent's, and so on."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._known: dict[Table, dict[tuple[int, ...], int]] = {}

    def sums(self, tokens: list[int], tables: Sequence[Table]) -> Tensor:
        """Sums the stored vectors of each token, over all windows that cover it. A causal window stores only its last token."""
        sums = torch.zeros(len(tokens), tables[0].meta.hidden)
        for middle, window in enumerate(windows_of(self._window, [tokens]).tolist()):
            _, link, row = self.find(window, tables)
            first = middle - self._window.centre + self._window.stored.start
            for place, vector in enumerate(tables[link].rows.vectors(row), start=first):
                if 0 <= place < len(tokens):
                    sums[place] += vector
        return sums

    def find(self, window: Sequence[int], tables: Sequence[Table]) -> tuple[int, int, int]:
        """Returns the first hit: how often the window was shortened, which table has it, and its row there.

        Searches the whole window in the domain, in its parent and so on up to the root. Then searches the window without its
        farthest tokens likewise, and so on.
        """
        own = self._window.centre
        shrinking = [list(window)]
        for farthest in range(len(window), 0, -1):
            for drop in (own - farthest, own + farthest):
                if 0 <= drop < len(window):
                    shrinking.append([0 if i == drop else token for i, token in enumerate(shrinking[-1])])
        for level, gram in enumerate(map(tuple, shrinking)):
            for link, table in enumerate(tables):
                row = self._rows(table).get(gram)
                if row is not None:
                    return level, link, row
        raise LookupError(f"the root table lacks token {window[own] - 1}")

    def _rows(self, table: Table) -> dict[tuple[int, ...], int]:
        """Returns the row of every n-gram of a table."""
        if table not in self._known:
            grams = table.space.unpack(table.index.by_row()).tolist()
            self._known[table] = {tuple(gram): row for row, gram in enumerate(grams, start=1)}
        return self._known[table]


@dataclass(frozen=True)
class Own:
    """Applies a tenant's adapter to the projections of one layer."""

    layout: Layout | None
    weights: dict[str, Tensor]

    def __call__(self, place: str, before: Tensor, after: Tensor) -> Tensor:
        own = {name.removeprefix(f"{place}/"): t.float() for name, t in self.weights.items() if name.startswith(f"{place}/")}
        if self.layout is None or not own:
            return after
        if self.layout.kind == "lora":
            return after + before @ own["a"].T @ own["b"].T
        if self.layout.kind != "bottleneck":
            raise NotImplementedError(f"adapter kind {self.layout.kind!r}: define in {__name__} how it changes a projection")
        inner = activation(self.layout.function)(after @ own["down"].T + own["down_bias"])
        return after + inner @ own["up"].T + own["up_bias"]


def adapters_of(backbone: Backbone, record: Record | None, layers: int) -> list[Own]:
    """Returns the adapter of each layer. Without a record, they change nothing."""
    if record is None:
        return [Own(None, {})] * layers
    layout = Layout.of(record.layout)
    return [Own(layout, weights) for weights in backbone.records.weights(record)]


def _sure(rows: Tensor, labels: int, task: str, temperature: float) -> float:
    """Returns how sure an exit is of the answer to these rows of its head's outputs."""
    if task == "multilabel":
        return float(torch.sigmoid(rows[0, :labels].abs().min() / temperature))
    best = torch.softmax(rows[:, :labels], dim=1).max(dim=1).values
    return float(torch.softmax(rows[int(best.argmin()), :labels] / temperature, dim=0).max())


def _tokens_of_words(text: str, encoded: Encoded) -> list[int | None]:
    """Returns the first token of each word of the text; None for a word without a token."""
    of_text = [i for i in range(len(encoded.tokens)) if encoded.parts[i] == 0]
    return [next((i for i in of_text if start <= encoded.offsets[i][0] < stop), None) for start, stop in words_of(text)]


def _attention(query: Tensor, key: Tensor, value: Tensor, config: BackboneConfig, number: int) -> Tensor:
    """Returns what each token reads from all tokens, or from near ones. `number`: of the layer in the whole model."""
    near = config.near if number % config.global_every else None
    base = config.rotary_base if near is None or config.near_base is None else config.near_base
    query, key, value = (part.unflatten(1, (-1, config.head_size)).transpose(0, 1) for part in (query, key, value))
    if base is not None:
        query, key = (torch.stack([turned(head, base) for head in part]) for part in (query, key))
    key, value = (part.repeat_interleave(len(query) // len(part), dim=0) for part in (key, value))
    scores = query @ key.transpose(1, 2) / query.shape[2] ** 0.5
    places = torch.arange(query.shape[1])
    far = (places[:, None] - places).abs() > (query.shape[1] if near is None else near)
    return (torch.softmax(scores.masked_fill(far, -torch.inf), dim=-1) @ value).transpose(0, 1).flatten(1)


def turned(x: Tensor, base: float) -> Tensor:
    """Rotates the tokens of one head as complex numbers: number i is the real part of the one half a head later."""
    half = x.shape[1] // 2
    angles = torch.outer(torch.arange(len(x)).double(), base ** (-torch.arange(half).double() / half))
    found = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([found.real, found.imag], dim=1).float()


def _unchanged(x: Tensor, norm: nn.Module) -> Tensor:
    return x


def product_in_eight_bits(x: Tensor, linear: nn.Linear) -> Tensor:
    inputs, input_scales = _in_eight_bits(x, 127)
    weight, weight_scales = _in_eight_bits(linear.weight, weight_levels())
    product = (inputs @ weight.T * input_scales * weight_scales.T).float()
    return product + linear.bias if linear.bias is not None else product  # pyright: ignore[reportUnnecessaryComparison]


def _in_eight_bits(rows: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Returns whole numbers and a scale for each row, in 64 bits, in which their products are exact."""
    scales = (rows.abs().max(dim=1, keepdim=True).values / levels).clamp(min=1e-30).double()
    return (rows / scales).round(), scales


def normed(x: Tensor, norm: nn.Module) -> Tensor:
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    assert isinstance(norm, nn.RMSNorm) and norm.eps is not None
    return x / (x.square().mean(dim=1, keepdim=True) + norm.eps).sqrt() * norm.weight
