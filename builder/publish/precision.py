"""Measures at an export whether products in 8 bits are faster on this machine's CPU, and close enough, for `--dtype auto`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from builder.store.store import Store
from hplm.engine.engine import INT8, Engine, Precision, resolve_precision
from hplm.model.attention import PackedAttention
from hplm.model.products import EightBitLinear, available, replace_products
from hplm.model.stacks import UpperStack
from hplm.model.tensors import array_of
from hplm.plot.gathering import Gatherer

CPU = torch.device("cpu")
LEAST_SPEED = 1.1  # below this the difference is not worth the rounding
MOST_CHANGE = 0.1
TOKENS = 128
BATCHES = (1, 4)  # texts
ROUNDS = 2
COMMON = 1000  # rows of a table, which are those of its most frequent n-grams
TEXTS, TEXT = 32, 32  # texts whose vectors are compared, and their tokens


@dataclass(frozen=True)
class EightBits:
    """Products in 8 bits beside `other`, which `auto` takes otherwise."""

    other: str
    speed: float  # times that of `other`: the smaller one of a single text and a batch
    change: float  # of the vectors that heads read, as a share of what they differ between tokens

    @property
    def auto(self) -> str:
        """Returns what `auto` means on a CPU."""
        return INT8 if self.speed >= LEAST_SPEED and self.change <= MOST_CHANGE else "auto"

    def __str__(self) -> str:
        return (
            f"int8 is {self.speed:.2f} x as fast as {self.other} (needed: {LEAST_SPEED}), "
            f"and changes vectors by {self.change:.1%} (allowed: {MOST_CHANGE:.0%})"
        )


def served_precision(store: Store, dtype: str, device: torch.device) -> Precision:
    """Returns the precision in which an export with `dtype` serves on this machine. `auto` measures, as the export does."""
    auto_on_cpu = "auto"
    if dtype == "auto" and device.type == "cpu" and available() and not store.config.is_decoder:
        auto_on_cpu = measure_eight_bits(store).auto
    return resolve_precision(dtype, device, auto_on_cpu)


def measure_eight_bits(store: Store, threads: int = 0) -> EightBits:
    """`threads`: those of the engine; 0: all cores."""
    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        other = resolve_precision("auto", CPU)
        return EightBits(other.name, _speed(store, other), _change(store))
    finally:
        torch.set_num_threads(before)


def _speed(store: Store, other: Precision) -> float:
    theirs, ours = Engine(store.upper(), CPU, other.dtype), Engine(store.upper(), CPU, torch.float32, eight_bits=True)
    tokens = min(TOKENS, store.config.positions)
    ratios: list[float] = []
    for texts in BATCHES:
        rounds = [(theirs.seconds(texts, tokens), ours.seconds(texts, tokens)) for _ in range(ROUNDS)]  # in turn
        ratios.append(min(their for their, _ in rounds) / min(our for _, our in rounds))
    return min(ratios)


@torch.inference_mode()
def _change(store: Store) -> float:
    """Compares vectors of made-up texts, whose rows are common ones of a domain's tables: a tenant's, if there is one."""
    branch = next(((tenant.domain, tenant.domain_version) for tenant in store.readable_tenants()), store.domains()[0])
    forest = store.forest(*branch)
    tables, tokens = forest.chain(*branch).links, min(TEXT, store.config.positions)
    generator = torch.Generator().manual_seed(0)
    rows = [
        base + torch.randint(1, min(COMMON, table.size), (TEXTS * tokens,), generator=generator)
        for table, base in tables
        if table.size > 1  # row 0 is of no n-gram
    ]
    mixed = torch.cat(rows)[torch.randperm(len(rows) * TEXTS * tokens, generator=generator)[: TEXTS * tokens]]
    lengths = [tokens] * TEXTS
    sums = Gatherer(CPU, torch.float32).sums(forest, array_of(mixed), np.array(lengths))
    positions = torch.arange(tokens).repeat(TEXTS)

    def vectors(upper: UpperStack) -> Tensor:
        attend = PackedAttention(lengths, store.config.heads)
        return upper.leave(upper.eval()(sums, positions, torch.zeros_like(positions), attend))

    in_eight_bits = store.upper()
    replace_products(in_eight_bits.layers, EightBitLinear)
    exact = vectors(store.upper())
    off, spread = vectors(in_eight_bits) - exact, exact - exact.mean(0)
    return float(off.square().sum().sqrt() / spread.square().sum().sqrt())
