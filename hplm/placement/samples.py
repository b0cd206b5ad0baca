"""Measures batches of a served backbone, layer by layer, with the code that serves, and fits terms to their times."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm

from hplm.adapters.layout import Layout
from hplm.arrays import Array
from hplm.engine.backbone import Backbone
from hplm.engine.engine import computed
from hplm.engine.request import EncoderRequest, Text
from hplm.engine.served import open_engine
from hplm.engine.settings import EncoderSettings
from hplm.errors import Broken, HplmError
from hplm.location import Location
from hplm.lookup.lookup import Lookup
from hplm.placement.profile import BackboneProfile, FitError, Shape, Terms
from hplm.tenants.snapshot import Tenant

MOST_TOKENS = 1024  # of a measured batch
# Texts and words of each: terms are fitted to these shapes.
EVEN = [
    *((1, words) for words in (4, 16, 32, 64, 128, 256, 512)),
    *((count, words) for count in (4, 16) for words in (8, 32, 64)),
    *((2, 128), (2, 512), (4, 128), (4, 256), (8, 128), (48, 16)),
]
HELD_OUT = 12  # batches of texts of mixed lengths, which no term is fitted to
WARMING = 1  # rounds that do not count


@dataclass(frozen=True)
class Samples:
    """The median times of batches."""

    shapes: list[Shape]
    layer_ns: Array  # batches x layers; the first layer's with all that is computed before it, the last one's with its heads
    around_ns: Array  # lookup and staging
    fitted_to: int  # the first batches, which are of even shapes; the others are held out

    def terms(self, ns: Array) -> Terms:
        """Returns the terms of these times of all batches."""
        return fitted(self.shapes[: self.fitted_to], ns[: self.fitted_to])

    def error(self, layers: Terms) -> FitError:
        """Returns how far the layers' sum is from the time of the batches that are held out."""
        ns = self.layer_ns[self.fitted_to :].sum(1)
        predicted = np.array([layers.ns(*shape) for shape in self.shapes[self.fitted_to :]])
        off = np.abs(predicted - ns) / ns
        return FitError(float(off.mean()), float(off.max()))


class Sampler:
    """Opens a backbone, and measures it in the calling thread."""

    def __init__(self, folder: Path, settings: EncoderSettings, state: Location | None = None) -> None:
        """`folder`: of its version, in the repository."""
        self._backbone = Backbone(folder, state)
        failures = self._backbone.view.forest.failures()
        if failures:
            raise failures[0]
        self._engine, self._stager = open_engine(self._backbone, settings, side_by_side=False)  # layers end one after the other
        self._layers = self._backbone.config.upper_layers
        self._lookup = Lookup(self._backbone)
        self._settings = settings
        self._most_tokens = min(MOST_TOKENS, settings.batch_tokens)
        self._rng = np.random.default_rng(0)
        self._words = words_of(folder / Backbone.TOKENIZER)
        self._tenants = self._drawn_tenants()
        self._ends: list[int] = []
        self._engine.after_layers(lambda: self._ends.append(time.perf_counter_ns()))

    def profile(self) -> BackboneProfile:
        """Returns what the backbone is and the memory that it takes, without times."""
        view, settings = self._backbone.view, self._settings
        snapshot, tables = view.snapshot, view.forest.tables()
        precision, upper = settings.precision, self._backbone.upper()

        def weights(module: nn.Module) -> int:
            products, others = 1 if precision.eight_bits else precision.dtype.itemsize, precision.dtype.itemsize
            return sum(one.numel() * (products if one.ndim > 1 else others) for one in module.parameters())

        tenants: dict[str, tuple[str, ...]] = {}
        for tenant in snapshot.tenants:
            tenants[tenant.domain] = (*tenants.get(tenant.domain, ()), tenant.id)
        table_bytes: Counter[str] = Counter()
        for table in tables:
            table_bytes[table.meta.domain] += sum(table.meta.sizes().values())
        parents = {table.meta.domain: table.meta.parent for table in tables}
        records = [record for tenant in snapshot.tenants for record in tenant.records()]
        layers = tuple(weights(layer) for layer in upper.layers)
        return BackboneProfile(
            layers=self._layers,
            precision=precision.name,
            export=snapshot.export,
            tenants=tenants,
            parents={domain: parent for domain, parent in parents.items() if parent is not None},
            entry_bytes=weights(upper) - sum(layers),
            layer_bytes=layers,
            table_bytes=dict(table_bytes),
            record_bytes=sum(Layout.of(record.layout).weight_bytes for record in records) // len(snapshot.tenants),
            slots=settings.slots,
            slot_bytes=self._stager.device_bytes // settings.slots,
            times={},
            around=Terms(),
        )

    def take(self, rounds: int, label: str = "") -> Samples:
        """Measures each batch in each round, in random order. `label`: of the progress bar."""
        even = [[words] * count for count, words in EVEN]
        batches = [self._batch(lengths) for lengths in even + self._mixed()]
        taken = np.zeros((WARMING + rounds, len(batches), self._layers + 1))
        with tqdm(total=len(taken) * len(batches), desc=label, unit="batch") as bar:
            for own in taken:
                order: list[int] = self._rng.permutation(len(batches)).tolist()
                for number in order:
                    own[number] = self._measured(*batches[number])
                    bar.update()
        medians = np.median(taken[WARMING:], axis=0)
        shapes = [Shape.of(np.array([text.tokens for text in texts])) for texts, _ in batches]
        return Samples(shapes, medians[:, :-1], medians[:, -1], len(EVEN))

    def _mixed(self) -> list[list[int]]:
        """Returns lengths of texts as they may come: many short ones, few long ones."""
        counts: list[int] = (self._rng.permutation(23)[:HELD_OUT] + 1).tolist()
        drawn: list[list[float]] = [self._rng.lognormal(3, 0.8, count).tolist() for count in counts]
        return [list(map(int, lengths)) for lengths in drawn]

    def _batch(self, lengths: Sequence[int]) -> tuple[list[Text], list[tuple[Tenant, str]]]:
        """Returns made-up texts of about these lengths, as many as a batch takes, also as they are given."""
        given: list[tuple[Tenant, str]] = []
        texts: list[Text] = []
        for length in lengths:
            tenant = self._tenants[len(given) % len(self._tenants)]
            text = " ".join(self._rng.choice(self._words, max(1, length - 2)).tolist())
            read = self._read(tenant, text)
            if texts and sum(one.tokens for one in texts + read) > self._most_tokens:
                break
            given.append((tenant, text))
            texts += read
        return texts, given

    def _read(self, tenant: Tenant, text: str) -> list[Text]:
        view = self._backbone.view
        pair = [text] if tenant.task_object.needs_pair else None
        form = self._lookup.resolve(view, tenant, [text], pair, truncate=True)
        tenant = replace(tenant, exits=None, students=None)  # a profile has the work of all layers
        return EncoderRequest(form, view, tenant, lambda request, answer: None).parts()

    def _measured(self, texts: list[Text], given: list[tuple[Tenant, str]]) -> list[int]:
        """Returns the nanoseconds of each layer, and of lookup and staging together."""
        begin = time.perf_counter_ns()
        for tenant, text in given:
            self._read(tenant, text)
        batch = self._stager.stage(texts, _raise)
        assert batch is not None  # or `_raise` has raised
        self._ends.clear()
        start = time.perf_counter_ns()
        computed(self._engine, batch)
        end = time.perf_counter_ns()
        self._stager.release(batch.held)
        by_sheet = np.array(self._ends).reshape(-1, self._layers)
        return [*_between(start, by_sheet, end), start - begin]

    def _drawn_tenants(self) -> list[Tenant]:
        """Returns tenants whose records fit in a batch's slots."""
        tenants = self._backbone.view.snapshot.tenants
        if not tenants:
            raise Broken(f"{self._backbone.folder} has no tenants: add one, or profile without this backbone")
        count = min(len(tenants), self._settings.slots // 2)
        return [tenants[number] for number in self._rng.permutation(len(tenants))[:count]]


def words_of(tokenizer: Path) -> list[str]:
    """Returns words of a vocabulary, for made-up texts."""
    known = Tokenizer.from_file(str(tokenizer)).get_vocab()
    return sorted(word for word in {token.strip("Ġ▁#") for token in known} if word.isalpha())


def _between(start: int, ends: Array, end: int) -> list[int]:
    """Returns the time of each layer: from the end of the one before. A batch may have several sheets, one after the other."""
    last = ends.copy()
    last[-1, -1] = end
    firsts = np.concatenate([[start], last[:-1, -1]])
    return np.diff(np.column_stack([firsts, last]), axis=1).sum(0).tolist()


def _raise(text: Text, error: HplmError) -> None:
    raise error


def fitted(shapes: Sequence[Shape], ns: Array) -> Terms:
    """Returns terms by least squares, none of them negative. Errors count relative to the measured times."""
    features = np.array([(1.0, *shape) for shape in shapes]) / ns[:, None]
    scale = np.maximum(np.linalg.norm(features, axis=0), 1e-300)
    features /= scale
    kept = [0, 1, 2, 3]
    found = _solved(features)
    while len(kept) > 1 and min(found) < 0:
        del kept[found.index(min(found))]
        found = _solved(features[:, kept])
    terms = np.zeros(4)
    terms[kept] = np.maximum(found, 0.0) / scale[kept]
    return Terms(*terms.tolist())


def _solved(features: Array) -> list[float]:
    """Returns what comes nearest to 1 in all rows."""
    inverse: Array = np.linalg.pinv(features)
    return inverse.sum(axis=1).tolist()
